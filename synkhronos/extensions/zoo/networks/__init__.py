"""The networks of the zoo, as functions that return layers, and the models that train them.

``alexnet``
    AlexNet.
``cifar10_cnn``
    The network of cuda-convnet for CIFAR-10.
``gan``
    WGAN and LS-GAN.
``googlenet``
    GoogLeNet, with auxiliary classifiers or without.
``lstm``
    LSTM cells that read reviews, or images row by row.
``resnet``
    ResNet-50 and ResNet-152.
``vgg``
    VGG16.
``wide_resnet``
    Wide-ResNet, with Keras.
"""
