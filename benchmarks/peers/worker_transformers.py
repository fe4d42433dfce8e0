"""transformers as a worker: ``generate`` in bf16, the batch padded on the left."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.peers.protocol import Flags, Served, TokenIds, read_flags, serve

# name -> (attention, kind of cache): at batch 16 and grouped queries, none of them is the fastest everywhere
VARIANTS = {"dynamic": ("sdpa", None), "static": ("sdpa", "static"), "eager": ("eager", None)}


def load(flags: Flags) -> Served:
    """Load the model in bf16."""
    torch.set_num_threads(flags.num_threads)
    attention, cache = VARIANTS[flags.variant]
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.bfloat16, attn_implementation=attention)
    model.eval()

    @torch.inference_mode()
    def decode(prompts: TokenIds, max_tokens: int) -> TokenIds:
        # No end-of-sequence id: nothing stops early, and no processor forbids one either. Whatever is not set here
        # would be filled from the model's own settings, which may sample or penalise.
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=cache,
        )
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(input_ids=ids, attention_mask=mask)
        token_ids: TokenIds = output[:, length:].tolist()
        return token_ids

    settings = {
        "dtype": "bfloat16",
        "attention": attention,
        "cache": cache or "dynamic",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return Served(transformers.__version__, settings, decode)


if __name__ == "__main__":
    flags = read_flags(tuple(VARIANTS))
    serve(lambda: load(flags))
