"""What this plugin offers. Imported whenever backends are listed, so keep torch and kernel libraries out of it."""

from hf_moe_backends import BackendSpec, Capabilities, hookimpl


@hookimpl
def hf_moe_backends_register():
    # Claim what the conformance suite proves. What is not claimed is refused, by name, before a model is touched:
    # a feature (see hf_moe_backends.spec.FEATURES), a gate, a dtype, a device, torch.compile, ...
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset(),  # the plain layout: weights (experts, out, in), gate and up one after the other, no bias
        gates=None,  # any gate, for the module's own is called. A fused kernel lists its own: frozenset({"swiglu"})
        compile=False,  # torch.compile cannot trace it ...
        host_sync=True,  # ... because the host waits for the number of rows of each expert
    )
    return [
        BackendSpec(
            kind="experts",
            name="hf_moe_backends_template",
            target="hf_moe_backends_template.experts:experts_forward",  # imported when a model first uses it
            capabilities=capabilities,
            install="pip install hf-moe-backends-template",  # what a user is told where it is missing
            # requires=(Requirement(distribution="my-kernel-library", version=">=1.2"),),
            # priority=60,  # above 0, experts="auto" considers it; the highest that can serve a model wins
        )
    ]
