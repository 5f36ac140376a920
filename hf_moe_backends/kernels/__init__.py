"""What an experts layer is made of: one file an idea, each a Triton kernel for CUDA beside its twin in plain torch.

R = T * K rows, one a routed pair of a token and an expert, sorted by expert. Pair p is slot p % K of token p // K.
"""
