"""``theanompi.models.lasagne_model_zoo``: models of layers of Lasagne, which are those of the zoo.

``vgg16``, ``resnet50``, ``resnet152``, ``wgan`` and ``lsgan`` have a model each.
"""
