"""The messages that the page "Troubleshooting" explains.

``docs/entries.py`` writes this file.
"""

#: In each line the anchor of an entry, and a message; ``...`` stands for what varies.
MESSAGES = """\
module-numpy-distutils-config-has-no module 'numpy.distutils.__config__' has no attribute 'blas_opt_info'
with-theano-synkhronos-needs-python-3 With Theano, Synkhronos needs Python 3.8 to 3.14
with-theano-synkhronos-needs-python-3 With Theano, Synkhronos needs NumPy ...
synkhronos-needs-python-3-8-or Synkhronos needs Python 3.8 or newer
and-got-theano-pymc and got Theano-PyMC ...
and-got-theano-pymc and got another package of this name
and-no-theano-is-installed and no Theano is installed
pip-fails-with-module-configparser-has module 'configparser' has no attribute 'SafeConfigParser'
packages-of-this-python-are-managed Packages of this Python, ..., are managed by the system
is-on-a-disk-with-bytes ..., is on a disk with ... bytes free
is-on-a-disk-with-bytes files of this process are limited to ... bytes
cannot-be-written-to ..., cannot be written to (...)
cannot-be-written-to ..., is on a disk from which no code can be run
cannot-be-written-to there is no home folder for ...
there-is-no-place-for-links there is no place for links to NVIDIA's libraries ...
of-the-ranks-values-equals-the ... of the ranks' values equals the serial value: give it as ...
it-contains-a-sum-over-the it contains a sum over the rows, and terms that do not depend on their number
has-the-shape has the shape ...
has-the-shape cannot be combined, as the ranks' values have the shapes ...
the-serial-value-is-the-sum the serial value is the sum of the ranks' values, not their average
no-op-gives-the-serial-value no op gives the serial value
no-op-gives-the-serial-value no reduction of the ranks' values gives the serial one
uses-whose-replicas-differ-between-the ... uses ..., whose replicas differ between the ranks
draws-from-random-stream-s-whose ... draws from ... random stream(s) whose state was set on the master only
uses-set-on-the-master-only ... uses ..., set on the master only
replicas-that-differ-from-the-master replicas that differ from the master's ...
this-call-the-replicas-of-differ ... this call the replicas of ... differ from the master's on rank(s) ...
rank-s-the-call-differs-from ... rank(s) the call differs from ...
expected-got-which-cannot-be-cast ...: expected ..., got ..., which cannot be cast safely
expected-with-dimensions-got-data-of ...: expected ... with ... dimensions, got Data of ... with ...
params-expected-one-dtype-for-the params: expected one dtype for the flat gradient vector
operation-of-not-defined-for-dtype operation ... of ...: not defined for dtype ...
operation-of-not-defined-for-dtype ...: ... cannot be averaged
outputs-are-averaged-by-default-avg ...: outputs are averaged by default ('avg'), which is not defined for dtype ...
loss-expected-a-float-expression loss: expected a float expression
is-0-in-give-a-number ...: ... is 0 in ...; give a number of at least ...
inputs-is-given-more-than-once inputs: ... is given more than once
inputs-is-given-more-than-once sliceable_shareds: ... is given more than once
inputs-is-given-more-than-once updates[...]: ... is updated more than once
inputs-is-given-more-than-once updates: ... is updated more than once
is-a-shared-variable-found-in ...: ... is a shared variable, found in the graph
function-expected-options-of-function-got function: expected options of ... .function, got ...
inputs-cannot-be-split-along-axis inputs: ... cannot be split along axis ...
inputs-is-sparse-and-can-be inputs: ... is sparse and can be split along axis 0 only
inputs-is-sparse-and-can-be bcast_inputs: ... is not split, so it has no axis
axis-is-for-an-output-that ...: axis=... is for an output that is gathered
the-input-keeps-a-value-between the input ... keeps a value between calls
updates-gather-cannot-accumulate-an-update updates[...]: 'gather' cannot accumulate an update
givens-is-replaced-by-a-value givens: ... is replaced by a value of rows that ... selects, but it is not known along which axis they are
givens-is-replaced-by-a-value-that givens: ... is replaced by a value that ... selects from the rows of
outputs-over-the-ranks-would-differ outputs[...]: ... over the ranks would differ from ...function()
outputs-over-the-ranks-would-differ nothing is divided among the ranks, so each of them computes the same
is-divided-among-the-ranks-along ... is divided among the ranks along an axis along which a scan computes each step from earlier ones
sliceable-shareds-is-not-used-by sliceable_shareds: ... is not used by the outputs, updates or givens
sliceable-shareds-is-not-used-by sliceable_shareds: ... is replaced by givens
sliceable-shareds-is-not-used-by sliceable_shareds: ... is updated by this function
sliceable-shareds-is-not-used-by sliceable_shareds[...]: ... cannot be sliced on axis 0
it-cannot-be-sent-to-workers ...: it cannot be sent to workers that are running already
functions-built-after-the-first-distribute functions built after the first distribute() are pickled in a thread with a stack of ... bytes
no-value-for ...: no value for ...
no-input-is-named ...: no input is named ...
no-input-is-named ...: ... inputs are named ...
no-input-is-named ...: input ... is given twice
no-input-is-named ...: data for the input ... is given twice
no-input-is-named ...: input ... has no name
expected-inputs-of-the-same-number ...: expected inputs of the same number of rows
no-rows-to-compute-on ...: no rows to compute on
no-rows-to-compute-on ...: no rank had any rows to compute on
row-is-out-of-range-for ...: row ... is out of range for ... rows
row-is-out-of-range-for ...: a boolean mask needs one entry per row
row-is-out-of-range-for ...: rows must be integers or booleans
expected-minibatch-data-of-rows ...: expected minibatch data of ... rows
batch-was-given-but-no-input ...: batch was given, but no input is scattered
batch-was-given-but-no-input ...: batch_s was given, but there are no sliceable_shareds
batch-was-given-but-no-input ...: num_slices was given, but no input can be sliced
this-rank-computes-of-the-rows this rank computes ... of the ... rows of the call; the graph fixes ...
the-update-of-cannot-accumulate-over the update of ... cannot accumulate over slices, as it is not a tensor but ...
outputs-cannot-be-combined-as-their outputs cannot be combined, as their shapes differ between the ranks
outputs-cannot-be-combined-as-their operation ... of ...: the slices' values have unequal shapes
outputs-cannot-be-combined-as-their ...: output ... cannot be reduced by ..., its shapes differ
output-cannot-be-gathered-its-shapes ...: output ... cannot be gathered, its shapes differ in more than axis ...
output-is-the-master-s-own ...: output ... is the master's own value (op None), but ...
output-is-none-on-rank-s ...: output ... is None on rank(s) ...
output-is-none-on-rank-s output ... is None on rank ...
output-is-none-on-rank-s ... is None in ... of ... slices
has-no-value-on-rank ... has no value on rank ...
has-no-value-on-rank ... has no value: ...
givens-expected-slices-of-the-same givens: expected slices of the same number of rows
givens-expected-slices-of-the-same givens: expected as many rows as of ..., ... rows, got ...
the-value-cannot-be-pickled ...: the value cannot be pickled
this-is-a-copy-that-was ...: this is a copy that was made for a program of spmd(), and cannot be called
copy-swap-does-not-use-the copy: swap: ... does not use the shared variable ...
copy-swap-does-not-use-the copy: swap: two shared variables of ... would be the same one
cannot-be-pickled-a-pickle-has ... cannot be pickled: a pickle has the values of the master
build-inputs ...: build_inputs: ...
not-an-array ...: not an array: ...
not-an-array make_slices: array ... has no axis 0
not-an-array set_length: this Data has no axis 0
not-an-array len() of 0-dimensional Data
data-give-value-or-shape-not data: give value or shape, not both
data-give-value-or-shape-not data: give var, or dtype and ndim, not both
data-give-value-or-shape-not data: give a value, a var, or dtype and ndim (or shape)
data-give-value-or-shape-not data: ndim is ..., but shape ... has ... extents
data-give-value-or-shape-not data: name must be a string
it-cannot-be-copied-or-pickled ...: it cannot be copied or pickled
its-memory-was-freed-by-free ...: its memory was freed by free_memory()
no-data-is-bound-to ...: no data is bound to ...
no-data-is-bound-to scatter: no values given, and no data bound to ...
data-of-a-numpy-memmap-is Data of a numpy.memmap: ... is no longer the file that was mapped
it-has-no-rows ...: it has no rows
it-has-no-rows value for ...: its type has no rows that can be split
it-has-no-rows ...: ... has no axis 0
shared-vars-is-not-used-by shared_vars: ... is not used by any function built with synk.function()
shared-vars-is-given-more-than shared_vars: ... is given more than once
reduction-expected-the-same-shape-on reduction ...: expected the same shape on every rank
gather-nd-up-0-expected-shapes gather(nd_up=0): expected shapes that are equal except for axis 0
gather-nd-up-0-expected-shapes all_gather: ... has extent ... on axis 0 by its type
reduction-the-weights-of-all-ranks reduction ...: the weights of all ranks are zero
reduction-the-weights-of-all-ranks weights: ... is not a function of this world
reduction-the-weights-of-all-ranks weights: expected ...
all-reduce-expected-the-same-shape all_reduce ...: expected the same shape and dtype on every rank
all-reduce-expected-the-same-shape all_gather: expected shapes that are equal
a-collective-is-inside-scan-or a collective is inside scan or OpFromGraph
a-collective-is-inside-scan-or function: ... is computed for one branch of an ifelse only
its-graph-uses-the-master-s ...: its graph uses the master's value (synk.ops.broadcast), but ...
the-ranks-are-at-different-collectives the ranks are at different collectives of their graphs
loss-op-the-loss-uses-the loss_op: the loss uses the collective ...
output-is-computed-from-a-gradient ...: output ... is computed from a gradient that passes a collective built with loss_op=...
inputs-no-input-is-divided-among inputs: no input is divided among the ranks
updates-the-new-value-of-depends updates: the new value of ... depends on ..., but no gradient of the loss was found in it
updates-the-new-value-of-uses updates: the new value of ... uses a gradient or the loss, and besides depends on ...
updates-the-new-value-of-uses ...: it uses a gradient, and besides depends on ...
updates-the-new-value-of-depends-on updates: the new value of ... depends on ... and ..., so that the average
updates-the-new-value-of-depends-on updates: the new value of ... and the ranks' values cannot be averaged
updates-the-new-value-of-depends-on updates: the new value of ... and only tensors can be combined
updates-a-gradient-is-changed-by updates: a gradient is changed by ..., such as by grad_clip()
updates-the-new-value-of-depends-on-random updates: the new value of ... depends on random numbers
loss-op-the-loss-contains-a loss_op: the loss contains a term that is the same on every rank
loss-op-the-loss-contains-a loss_op: 'sum' is the operation for a loss
loss-op-the-loss-is-a loss_op: the loss ... is a sum over the rows
loss-op-the-loss-is-a loss_op: outputs[...] is a loss, whose values are added up
loss-op-the-loss-adds-a loss_op: the loss ... adds a sum over the rows and a mean over the rows
loss-op-the-loss-is-a-mean loss_op: the loss ... is a mean over the rows
changes-of-cannot-be-added-as ...: changes of ... cannot be added, as it is bool
update-rule-got-ready-updates-which update_rule: got ready updates, which take no arguments
params-expected-parameters-that-the-loss params: expected parameters that the loss depends on
params-expected-parameters-that-the-loss ...: the same shared variable as params[...]
params-expected-parameters-that-the-loss updates[...]: a second update of ...
keras-is-not-installed Keras is not installed
keras-is-not-installed keras: expected version 2.3.1
keras-is-not-installed Keras was imported with the back end ...
keras-is-not-installed KERAS_BACKEND: expected 'theano'
model-layers-keep-states-of-the model: layers ... keep states of the rows from batch to batch
metric-it-adds-a-sum-over metric ...: it adds a sum over the rows and a mean of the rows
metric-it-adds-a-sum-over metric ...: its update does not add to its state
metric-it-adds-a-sum-over ...: it is no ... the rows
sample-weights-expected-equal-ones sample weights: expected equal ones
there-is-no-file there is no file ...
there-is-no-file there is no folder ... for the file ...
there-is-no-file expected the name of a file, got ...
expected-a-path-that-no-other expected a path that no other user controls, got the ... of the user with the number ...
is-damaged-or-is-not-a ... is damaged, or is not a checkpoint written by synk.save()
load-the-file-does-not-fit load: the file does not fit: ...
load-the-file-was-saved-by load: the file was saved by ... ranks, but there are ... ranks now
save-without-expected-shared-variables save: without: expected shared variables
save-without-expected-shared-variables save: ...: expected a tensor or a random stream
save-without-expected-shared-variables expected names that are strings, got ...
no-processes-yet-call-synk-fork no processes yet: call synk.fork() first
the-processes-were-closed-call-synk the processes were closed: call synk.fork() again first
the-processes-were-closed-call-synk these processes were closed
the-processes-were-closed-call-synk ...: its processes were closed
the-processes-were-closed-call-synk ...: the processes of this Data were closed
the-processes-were-closed-call-synk ...: the processes of this function were closed
fork-there-are-processes-already fork(): there are processes already
synk-close-there-are-no-processes synk.close(): there are no processes to close
rank-raised rank ... raised ...
a-worker-died a worker died: ...
a-barrier-lasted-longer-than-fork a barrier lasted longer than fork(timeout=...) seconds
the-workers-were-ended-from-another the workers were ended from another thread
another-call-has-not-returned-yet another call has not returned yet
result-the-fuse-block-has-not result(): the fuse() block has not ended
result-the-fuse-block-has-not result(): the fuse() block of this call ended with an error
result-the-fuse-block-has-not this is the pending result of a call inside fuse()
fuse-already-inside-a-fuse-block fuse(): already inside a fuse() block
fuse-already-inside-a-fuse-block profile(): already inside a profile() block
expected-a-function-that-computes-one ...: expected a function that computes one operation after another, to time each
not-inside-a-fuse-block ...: not inside a fuse() block
not-inside-a-fuse-block ...(): not inside a ...() block
not-inside-a-fuse-block reseed(): call it before or after the fuse() block
fork-this-process-is-itself-a fork(): this process is itself a daemonic worker of multiprocessing
this-process-was-forked-from-the this process was forked from the master
this-process-was-forked-from-the restart(): this process was forked from the master
this-process-was-forked-from-the close(): this process is rank ..., a worker
fork-processes-are-more-than-the fork(): ... processes are more than the ... that this machine allows
fork-processes-are-more-than-the only ... of ... workers could be started
fork-processes-are-more-than-the fork(): a file could not be read
processes-share-core-s ... processes share ... core(s)
restart fork(restart=True): this process uses ...
restart fork: JAX is in use in this process already
profile-workers-was-not-written profile_workers: ... was not written
the-processes-finish-their-command-first ...: the processes finish their command first; a second one ends them at once
all-ranks-are-asked-to-stop ...: all ranks are asked to stop; a second one ends them at once
inside-a-program-of-spmd-ranks inside a program of spmd(), ranks run by themselves
the-ranks-of-the-program-are the ranks of the program are at different collectives
rank-waits-in-a-collective-for rank ... waits in a collective for rank ..., which ended the program without it
the-program-its-arguments-or-a the program, its arguments, or a global variable that it uses cannot be sent to the workers
loading-cannot-be-read-remove-or loading: ... cannot be read: ...; remove or replace it
loading-cannot-be-read-remove-or none of them can be read
loading-rows-cannot-be-read-and loading: ... rows cannot be read and are left out
loading-process-raised-an-exception loading: process ... raised an exception
process-of-has-ended ...: process ... of ... has ended
process-of-has-ended ...: a process has closed its pipe
only-of-processes-could-be-started ...: only ... of ... processes could be started
loading-batch-was-not-loaded-within loading: batch ... was not loaded within timeout=... seconds
loading-this-loop-cannot-go-on loading: this loop cannot go on, as another epoch of the loader was begun meanwhile
loading-this-loader-was-closed loading: this loader was closed
loading-this-loader-was-closed loading: the memory of the loader (...) is not on this machine
loading-this-process-was-forked-from loading: this process was forked from the script, to which the loader belongs
listener-the-name-cannot-be-used listener: the name ... cannot be used
attach-there-is-no-controller attach: there is no controller ...
attach-there-is-no-controller attach: the controller ... has ended
attach-the-controller-does-not-answer attach: the controller ... does not answer
attach-the-controller-has-no-place attach: the controller ... has no place for another process
attach-the-controller-belongs-to-another attach: the controller ... belongs to another user
the-controller-has-ended-or-has the controller ... has ended, or has ended this process's part
ask-the-controller-raised-an-exception ask: the controller raised an exception
ask-no-answer-within-seconds ask: no answer within ... seconds
ask-no-answer-within-seconds recv_mb: no minibatch within ... seconds
listener-serve-expected-to-attach-but Listener.serve: expected ... to attach, but ... came
this-process-is-no-longer-attached this process is no longer attached
the-attached-process-has-ended-and the attached process ... has ended, and the others wait for it in a collective
the-are-at-different-collectives the ... are at different collectives
rank-has-ended-its-program-and rank ... has ended its program, and others of its group wait for it
collectives-of-attached-processes-need-their collectives of attached processes need their number
the-request-of-worker-has-no the request ... of worker ... has no answer
the-request-of-worker-has-no the request ... has no answer
workers-have-failed-exit-codes-by workers have failed; exit codes by process: ...
fork-use-gpu-true-but-pygpu fork: use_gpu=True, but pygpu is not installed
fork-use-gpu-true-but-pygpu ... but this virtual environment does not see pygpu
fork-use-gpu-true-but-pygpu fork: use_gpu=True, but pygpu finds no GPU
fork-use-gpu-true-but-pygpu fork: devices: ... need pygpu
fork-theano-already-uses-a-gpu fork: Theano already uses a GPU in this process
fork-rank-cannot-use-the-device fork: rank ... cannot use the device ...
fork-rank-cannot-use-the-device device: this process is already bound to ...
fork-rank-cannot-use-the-device fork: n_parallel is ..., but ... devices are named
fork-rank-cannot-use-the-device fork: use_gpu is ..., but the devices are ...
collectives-use-shared-memory-not-nccl collectives use shared memory, not NCCL
inputs-expected-tensor-variables-whose-values inputs: expected tensor variables, whose values are NumPy arrays
the-cuda-driver-s-failed the CUDA driver's ... failed
shared-memory-bytes-were-requested shared memory: ... bytes were requested
fork-no-address-space-is-left fork(): no address space is left for ... bytes
"""  # noqa: E501
