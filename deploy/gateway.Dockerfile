# The gateway: SMG, which others make, turns the HTTP APIs of OpenAI and Anthropic into calls of a runtime (docs/fleet.md).
#
#     docker build --file deploy/gateway.Dockerfile --tag kiln-gateway .
#
# deploy/constraints.txt has the version of each package. PIP_EXTRA_ARGS takes options of `pip install`, such as
# `--index-url URL` with an index of your own.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_EXTRA_ARGS=
RUN python -m venv /opt/kiln
COPY deploy/constraints.txt /src/constraints.txt
RUN --mount=type=cache,target=/root/.cache/pip /opt/kiln/bin/python -m pip install ${PIP_EXTRA_ARGS} --constraint /src/constraints.txt smg
RUN /opt/kiln/bin/python -m pip uninstall --yes pip

FROM ${PYTHON_IMAGE}
# The user id of the other images: it may read the API key that the issuer makes.
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/kiln --shell /usr/sbin/nologin kiln
COPY --from=build /opt/kiln /opt/kiln
COPY deploy/gateway.py /opt/kiln/gateway.py
USER 10001:10001
WORKDIR /var/lib/kiln
# SMG asks the Hub for a model before it asks the runtime. Nothing can listen at port 0.
ENV PYTHONUNBUFFERED=1 HF_ENDPOINT=http://127.0.0.1:0
EXPOSE 8000
ENTRYPOINT ["/opt/kiln/bin/python", "/opt/kiln/gateway.py"]
CMD ["--help"]
