# The compiler with Neuron's packages, which compile for inf2, trn1, trn2 and trn3. It needs no device.
#
#     docker build --file deploy/compiler.Dockerfile --tag kiln-compiler .
#     docker build --file deploy/compiler-neuron.Dockerfile --tag kiln-compiler-neuron .
#
# No container engine has built it. Neuron's packages need another torch than the compiler, so they have a virtual
# environment of their own; neuron_lowering/pyproject.toml has their versions. They come from NEURON_INDEX and from where
# pip looks by itself; PIP_EXTRA_ARGS takes options of `pip install`.

ARG COMPILER_IMAGE=kiln-compiler

FROM ${COMPILER_IMAGE}
ARG PIP_EXTRA_ARGS=
ARG NEURON_INDEX=https://pip.repos.neuron.amazonaws.com
USER 0
RUN python -m venv /opt/kiln-neuron
COPY neuron_lowering /src/neuron_lowering
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln-neuron/bin/python -m pip install ${PIP_EXTRA_ARGS} --extra-index-url ${NEURON_INDEX} /src/neuron_lowering
USER 10001:10001
ENV KILN_COMPILER_NEURON_PYTHON=/opt/kiln-neuron/bin/python
