# An image with the environment of the demos and the tests:
#     docker build --tag synkhronos .
#     docker run --rm synkhronos                  trains a network on MNIST, the main demo
#     docker run --rm synkhronos sh tests/run     runs the tests
# The memory that processes share is not in /dev/shm, so Docker's limit for it does not matter.
# Debian 12 is the last release of Debian with pygpu, for the tests of the GPU back end.
FROM debian:12-slim

# The script below installs compilers, OpenBLAS, OpenCL and OpenMPI; these are what it needs itself, in the
# version of the Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /synkhronos
COPY . .
RUN sh tools/environment.sh --with-opencl --with-mpi --with-pymc \
    && rm -rf /root/.cache/pip /var/lib/apt/lists/*

CMD ["sh", "demos/run"]
