# The server, on a CPU by default; --build-arg TORCH=cuda brings the CUDA libraries. It runs as a user of its own, needs
# no network with a mounted model, and no writable file system but /cache and /tmp:
#
#   docker build -t nanoserve .
#   docker run --rm -p 127.0.0.1:8000:8000 --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#     --stop-timeout 30 -v nanoserve-cache:/cache -v /models/qwen:/model:ro nanoserve /model --served-model-name qwen
#
# Keys: -v /etc/nanoserve:/keys:ro and --api-key-file /keys/keys.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
WORKDIR /src
COPY . .
RUN PYTHON=python3 VENV=/venv sh .ci/install_torch.sh "$TORCH" \
 && /venv/bin/python -m pip install --no-deps --no-build-isolation .

FROM python:${PYTHON}-slim
ENV PATH=/venv/bin:$PATH \
    PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface NUMBA_CACHE_DIR=/cache/kernels
RUN useradd --system --uid 10001 --home-dir /cache --shell /usr/sbin/nologin nanoserve \
 && install --directory --owner nanoserve --mode 0755 /cache
COPY --from=build /venv /venv
USER 10001
WORKDIR /cache
# Compiles the kernels for the CPU that builds the image. Another CPU compiles them once, into /cache.
RUN nanoserve generate --max-tokens 2 "What is a page?"
VOLUME /cache
EXPOSE 8000
# With --port, --uds or TLS give a check of your own: docker run --health-cmd.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["nanoserve", "serve", "--host", "0.0.0.0"]
