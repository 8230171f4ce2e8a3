# The runtime: loads bundles and streams tokens. It holds no compiler: neither Kiln's, nor a C++ one.
#
#     docker build --file deploy/runtime.Dockerfile --tag kiln-runtime .
#
# deploy/constraints.txt has the version of each package. deploy/install-torch says where torch's CPU build comes from.
# PIP_EXTRA_ARGS takes options of `pip install`, such as `--index-url URL` with an index of your own, and TORCH_INDEX the
# URL of a mirror of PyTorch's index of CPU builds.
#
# The first steps are those of deploy/compiler.Dockerfile, so that one cached layer holds torch for both.

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
COPY runtime_svc /src/runtime_svc
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip wheel ${PIP_EXTRA_ARGS} --no-deps --no-build-isolation --wheel-dir /wheels /src/runtime_svc
# With the API that routers know (docs/api.md).
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip install ${PIP_EXTRA_ARGS} --constraint /src/constraints.txt /wheels/*.whl 'kiln-runtime[vllm-engine]'
# The libraries are optional for pip; without the first no bundle of several ranks runs.
RUN ls /opt/kiln/lib/python3.11/site-packages/execution/_collectives*.so /opt/kiln/lib/python3.11/site-packages/execution/_sampling*.so
# What no service needs: torch's tests and its headers, which only a compiler reads, and pip.
RUN rm -r /opt/kiln/lib/python3.11/site-packages/torch/test /opt/kiln/lib/python3.11/site-packages/torch/include && find /opt/kiln/lib/python3.11/site-packages/torch/bin -type f ! -name torch_shm_manager -delete && /opt/kiln/bin/python -m pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
# One user id in both images: what the compiler publishes in the shared store, the runtime may read.
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/kiln --shell /usr/sbin/nologin kiln
# A volume that is mounted here for the first time takes over this owner and mode.
RUN install --directory --mode 0700 --owner kiln --group kiln /var/lib/kiln/store /var/lib/kiln/state /var/lib/kiln/cache /var/lib/kiln/keys /var/lib/kiln/auth
COPY --from=build /opt/kiln /opt/kiln
USER 10001:10001
WORKDIR /var/lib/kiln
ENV PYTHONUNBUFFERED=1
EXPOSE 50052
ENTRYPOINT ["/opt/kiln/bin/python", "-m", "runtime_svc"]
CMD ["--help"]
