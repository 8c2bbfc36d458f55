"""``theanompi.models.keras_model_zoo``: a model of Keras, ``wresnet``, which is that of the zoo."""
