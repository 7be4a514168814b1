# SGLang's router, in the version that the tests run (tests/clients.txt).
FROM docker.io/library/python:3.12-slim
RUN pip install --no-cache-dir sglang-router==0.3.2
ENTRYPOINT ["python", "-m", "sglang_router.launch_router"]
