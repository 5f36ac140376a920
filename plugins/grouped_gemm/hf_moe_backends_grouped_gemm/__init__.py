"""`experts="grouped_gemm"`: the experts layer of `torch_mm` on the matrix products of the grouped_gemm library."""

from __future__ import annotations

from hf_moe_backends import BackendSpec, Capabilities, Requirement, hookimpl
from hf_moe_backends.spec import FEATURES


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    return [
        BackendSpec(
            kind="experts",
            name="grouped_gemm",
            target="hf_moe_backends_grouped_gemm.products:grouped_gemm",
            capabilities=Capabilities(
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=frozenset({"bfloat16"}),
                features=frozenset(FEATURES["experts"]),
                alignment=8,  # CUTLASS loads 16 bytes of a row at a time
                host_sync=True,  # the library takes the number of rows of each expert on the CPU
            ),
            requires=(Requirement(distribution="grouped_gemm", version=">=0.3,<0.4"),),
            install="pip install 'hf-moe-backends-grouped-gemm[cuda]'",
            priority=20,  # below torch_mm, whose products are as fast and wait for nothing
        )
    ]
