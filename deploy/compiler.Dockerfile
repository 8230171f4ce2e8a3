# The compiler: checkpoint and configuration in, bundle out. It holds a C++ compiler, which lowering needs.
#
#     docker build --file deploy/compiler.Dockerfile --tag kiln-compiler .
#
# deploy/constraints.txt has the version of each package. deploy/install-torch says where torch's CPU build comes from.
# PIP_EXTRA_ARGS takes options of `pip install`, such as `--index-url URL` with an index of your own, and TORCH_INDEX the
# URL of a mirror of PyTorch's index of CPU builds.
#
# The first steps are those of deploy/runtime.Dockerfile, so that one cached layer holds torch for both.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_EXTRA_ARGS=
ARG TORCH_INDEX=
RUN python -m venv /opt/kiln
COPY deploy/constraints.txt /src/constraints.txt
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip install ${PIP_EXTRA_ARGS} --constraint /src/constraints.txt --upgrade pip setuptools
COPY deploy/install-torch /src/install-torch
RUN --mount=type=cache,target=/root/.cache/pip sh /src/install-torch /opt/kiln/bin/python ${PIP_EXTRA_ARGS} --constraint /src/constraints.txt
# The collective operators are a native library.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY protos /src/protos
COPY bundle /src/bundle
COPY targets /src/targets
COPY edge /src/edge
COPY execution /src/execution
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip wheel ${PIP_EXTRA_ARGS} --no-deps --no-build-isolation --wheel-dir /wheels /src/protos /src/bundle /src/targets /src/edge /src/execution
COPY compiler_svc /src/compiler_svc
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip wheel ${PIP_EXTRA_ARGS} --no-deps --no-build-isolation --wheel-dir /wheels /src/compiler_svc
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip install ${PIP_EXTRA_ARGS} --constraint /src/constraints.txt /wheels/*.whl
# What every library shares, which the first compile would make; the headers would add 280 MB.
RUN /opt/kiln/bin/python -m compiler_svc.lower.prebuilt --isa x86-64-v3 --without-headers
# The libraries are optional for pip; without the first no bundle of several ranks is verified.
RUN ls /opt/kiln/lib/python3.11/site-packages/execution/_collectives*.so /opt/kiln/lib/python3.11/site-packages/execution/_sampling*.so
# What no service needs: torch's tests, and pip.
RUN rm -r /opt/kiln/lib/python3.11/site-packages/torch/test && find /opt/kiln/lib/python3.11/site-packages/torch/bin -type f ! -name torch_shm_manager -delete && /opt/kiln/bin/python -m pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# One user id in both images: what the compiler publishes in the shared store, the runtime may read.
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/kiln --shell /usr/sbin/nologin kiln
# A volume that is mounted here for the first time takes over this owner and mode.
RUN install --directory --mode 0700 --owner kiln --group kiln /var/lib/kiln/store /var/lib/kiln/state /var/lib/kiln/cache /var/lib/kiln/keys /var/lib/kiln/auth /var/lib/kiln/gateway
COPY --from=build /opt/kiln /opt/kiln
USER 10001:10001
WORKDIR /var/lib/kiln
ENV PYTHONUNBUFFERED=1
EXPOSE 50051
ENTRYPOINT ["/opt/kiln/bin/python", "-m", "compiler_svc"]
CMD ["--help"]
