# One image for the three services of a node; the command chooses which (see compose.yaml).
#   docker build -t tessera .                                                             torch for the CPU
#   docker build -t tessera --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=gpu .
#                                                                        torch with CUDA, Triton and the driver bindings
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
ARG TORCH_INDEX=""
ARG EXTRAS=""
WORKDIR /src
RUN python -m venv /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# torch first: it is the largest part and changes least, so it gets a layer of its own.
COPY constraints.txt ./
COPY cli/torch_build.py cli/torch_build.py
RUN python -P cli/torch_build.py install --constraint constraints.txt --index "${TORCH_INDEX}"
COPY . .
RUN pip install --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}" && python -P cli/torch_build.py check

FROM python:${PYTHON_VERSION}-slim
RUN groupadd --gid 10001 tessera \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/tessera --shell /usr/sbin/nologin tessera \
 && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/tessera \
 && install --directory --mode 0755 /models
COPY --from=build /opt/tessera /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A named volume that is mounted here for the first time takes over this folder's owner and mode.
VOLUME /var/lib/tessera
USER 10001:10001
ENTRYPOINT ["tessera"]
CMD ["--help"]
