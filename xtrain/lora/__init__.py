"""LoRA: fine-tuning with a few new parameters, in PEFT's file format.

    from xtrain import lora, models
    model = lora.apply(models.load("base"), r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    optimizer = xt.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    ...
    lora.save(model, "adapter")                            # adapter_config.json and adapter_model.safetensors
    model = lora.load(models.load("base"), "adapter")
    lora.merge(model), lora.unmerge(model)                 # one product a layer, and back, bit for bit
    lora.unload(model).save_pretrained("tuned")            # a plain model

How-to: docs/how-to/fine-tuning.md.
"""

from ..nn.lora import LoraConfig, LoraLinear, apply, merge, unload, unmerge
from ..saving.adapter import load_adapter as load
from ..saving.adapter import save_adapter as save

__all__ = ["LoraConfig", "LoraLinear", "apply", "load", "merge", "save", "unload", "unmerge"]
