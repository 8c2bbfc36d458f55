"""Sessions: the models of Theano-MPI on all ranks, with any training rule.

A model is a class with methods for a batch of training and of validation. `Session` builds one on every
rank, and trains them with a rule of `synkhronos.extensions.rules`. It needs nothing else from a script:

.. code-block:: python

    from synkhronos.extensions.session import Session

    if __name__ == "__main__":
        Session(model="models.modelfile:ModelClass", rule="EASGD", devices=2).run()

The modules: ``session`` is the script's side, and each rank's side. ``model`` is what a model
must have, with its learning rate, its velocities for ``sync_type="cdd"``, and its state for checkpoints.
``recorder`` has the record, the comparison of runs, and what the model of a rank is given. ``inforec``
reads Theano-MPI's records.
"""

from synkhronos.extensions.session.model import SummedVelocities
from synkhronos.extensions.session.recorder import RankRecorder, Recorder, compare
from synkhronos.extensions.session.session import Session

__all__ = ["RankRecorder", "Recorder", "Session", "SummedVelocities", "compare"]
