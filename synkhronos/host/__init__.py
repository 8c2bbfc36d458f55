"""The setup of the machine and of the process. Nothing here knows about ranks.

``compiler`` chooses the graph compiler, and ``preparation`` prepares the process for it:
``environment`` finds a BLAS for Theano, ``imports`` loads Theano, Lasagne and Keras with the
``repairs`` that this version of Python and NumPy needs, and ``pytensor_environment`` finds a BLAS for
PyTensor. ``installation`` installs Theano, Lasagne and Keras with pip. ``heap`` makes malloc keep
memory, ``signals`` defers Ctrl-C and other signals, ``handlers`` recognizes what signal handlers raise,
``frames`` tells which function was called below which, ``descriptors`` says which files a worker does
not inherit, and ``signal_thread`` acts after a signal for which no handler can run. ``machine`` counts
the cores and bytes that this process may use, and ``job`` tells whether it is a task of an MPI job.
``compile_cache`` checks whether Theano has room to compile, and ``ownership`` who else can change its
code. ``libraries`` finds NVIDIA's libraries, and ``library_links`` creates links with the names that
libgpuarray expects. ``supervision`` makes an exit code of a signal that ends the script. The folder
``doctor`` has the checks of the command of this name. ``progress`` shows the
progress of long steps, such as compiling, and
``log`` writes the log.

May import: nothing.
"""
