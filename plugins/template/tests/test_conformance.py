"""Does the backend compute what stock Transformers computes? One test a case; `pytest -k float32-default` is quick."""

from hf_moe_conformance.pytest_plugin import parametrize_with_checks


@parametrize_with_checks("experts", "hf_moe_backends_template")
def test_conformance(check):
    check()
