# Outrider's server on a CPU. Build: docker build -t outrider .
# Run:   docker run -p 127.0.0.1:8000:8000 -v outrider-models:/models -e OUTRIDER_API_KEYS=some-long-key outrider --draft suffix
# Models and compiled passes are kept in the volume /models, so that the next start is quick.

FROM python:3.12-slim AS build
# The native pass is compiled during installation; its kernels are chosen when the server starts.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The default build of torch brings gigabytes of GPU libraries. If a package index of yours has a CPU build, name it:
#   docker build --build-arg TORCH_INDEX=https://... -t outrider .
ARG TORCH_INDEX=
RUN python -m venv /opt/outrider \
 && /opt/outrider/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep ^torch== constraints.txt)" \
 && /opt/outrider/bin/pip install --no-cache-dir -c constraints.txt '.[serve]'

FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 outrider \
 && install --directory --owner outrider /models
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH OUTRIDER_CACHE=/models HF_HOME=/models/huggingface
USER outrider
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["outrider", "serve", "--host", "0.0.0.0", "--port", "8000"]
