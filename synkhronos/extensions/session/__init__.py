"""Sessions: the models of Theano-MPI on all ranks, with any training rule.

A model is a class with methods for a batch of training and of validation. `Session` builds one on every
rank, and trains them with a rule of `synkhronos.extensions.rules`. It needs nothing else from a script:

.. code-block:: python

    from synkhronos.extensions.session import Session

    if __name__ == "__main__":
        Session(model="models.modelfile:ModelClass", rule="EASGD", devices=2).run()

The modules: ``session`` is the script's side, and ``loop`` each rank's side. ``contract`` is what a
model must have, ``velocities`` the exchange for ``sync_type="cdd"``, ``learning_rate`` linear scaling
and the warm-up, and ``model_state`` what a checkpoint has of a model. ``recorder`` has the record and
the comparison of runs, ``rank_recorder`` what the model of a rank is given, and ``sinks`` where numbers
are written while the ranks train. ``inforec`` reads Theano-MPI's records.
"""

from synkhronos.extensions.session.model import SummedVelocities
from synkhronos.extensions.session.recorder import RankRecorder, Recorder, compare
from synkhronos.extensions.session.session import Session

__all__ = ["RankRecorder", "Recorder", "Session", "SummedVelocities", "compare"]
