# The runtime with AWS's libnrt, which runs bundles for inf2, trn1, trn2 and trn3 on the host's NeuronCores.
#
#     docker build --file deploy/runtime.Dockerfile --tag kiln-runtime .
#     docker build --file deploy/runtime-neuron.Dockerfile --tag kiln-runtime-neuron .
#
# No container engine has built it. The driver is the host's: aws-neuronx-dkms, and a container gets the devices
# (--device=/dev/neuron0). The versions are those of targets/neuron_releases.py.

ARG RUNTIME_IMAGE=kiln-runtime

FROM ${RUNTIME_IMAGE}
# Ubuntu 22.04: the repository's suites are Ubuntu's, and this one's glibc is older than that of Debian 12.
ARG NEURON_SUITE=jammy
ARG NEURON_RUNTIME_VERSION=2.34.10.0
ARG NEURON_COLLECTIVES_VERSION=2.34.10.0
USER 0
ADD --chmod=0644 https://apt.repos.neuron.amazonaws.com/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB /etc/apt/keyrings/neuron.asc
RUN echo "deb [signed-by=/etc/apt/keyrings/neuron.asc] https://apt.repos.neuron.amazonaws.com ${NEURON_SUITE} main" > /etc/apt/sources.list.d/neuron.list
# A package's version goes on with a hash.
RUN apt-get update && apt-get install --yes --no-install-recommends "aws-neuronx-runtime-lib=${NEURON_RUNTIME_VERSION}*" "aws-neuronx-collectives=${NEURON_COLLECTIVES_VERSION}*" && rm -rf /var/lib/apt/lists/*
RUN ls /opt/aws/neuron/lib/libnrt.so.1
USER 10001:10001
