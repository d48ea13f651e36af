"""The integration of diffusers, with that library: pipelines go, what they share stays, offload ends."""

# packages: integrations

import os
import sys
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))
warnings.simplefilter("ignore")

import diffusers
import torch
from _integrations import allocated, nothing_left
from bench import main, raises

import unhand
from unhand.integrations import diffusers as of_diffusers

diffusers.utils.logging.set_verbosity_error()


def transformer():
    return diffusers.DiTTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=32, num_attention_heads=4, in_channels=4, out_channels=8,
        num_embeds_ada_norm=10,
    )


def vae():
    return diffusers.AutoencoderKL(
        block_out_channels=(64,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=4, norm_num_groups=8,
    )


def pipeline(of_vae=None):
    made = diffusers.DiTPipeline(transformer(), of_vae or vae(), diffusers.DDIMScheduler())
    made.set_progress_bar_config(disable=True)
    return made


def generate(pipe):
    return pipe([1], guidance_scale=1.0, num_inference_steps=1, output_type="np").images


def bytes_of(*modules):
    """Allocated bytes of the parameters and buffers of modules on the GPU."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers()) if tensor.is_cuda]
    return sum(-(-tensor.numel() * 4 // 512) * 512 for tensor in tensors)


def check_what_two_pipelines_share_stays():
    floor = nothing_left()
    shared = vae()
    one, two = pipeline(shared).to("cuda"), pipeline(shared).to("cuda")
    generate(one)
    mine = one.transformer
    freed = of_diffusers.release(one)
    assert allocated() == floor + bytes_of(two.transformer, shared), freed
    raises(unhand.FreedError, lambda: mine.pos_embed.proj.weight + 1)
    assert generate(two).shape == generate(two).shape
    # Nobody else has it now; `keep` still does.
    del one
    of_diffusers.release(two, keep=shared)
    del two
    assert nothing_left() == floor + bytes_of(shared)
    three = pipeline(shared).to("cuda")
    generate(three)
    with of_diffusers.session(three) as session:
        generate(three)
    assert allocated() == floor and session.landing.left_bytes == 0, session.landing


def check_no_pipeline_is_loaded_beside_another():
    floor = nothing_left()
    seen = []

    def make():
        seen.append(allocated())
        return pipeline().to("cuda")

    pipe = of_diffusers.switch(None, make)
    generate(pipe)
    caches = [pipe.transformer]
    pipe = of_diffusers.switch(pipe, make)
    assert seen == [floor, floor], (seen, floor)
    assert len(caches) == 1 and generate(pipe).ndim == 4
    of_diffusers.release(pipe)
    assert allocated() == floor


def check_offload_hooks():
    floor = nothing_left()
    shared = vae()
    one, two = pipeline(shared), pipeline(shared)
    one.enable_model_cpu_offload()
    two.enable_model_cpu_offload()
    # A call that is broken off leaves on the GPU what was there.
    with of_diffusers.offloading(two):
        number = torch.zeros(1, dtype=torch.long, device="cuda")
        two.transformer(torch.zeros(1, 4, 8, 8, device="cuda"), number, number)
        del number
        assert allocated() > floor
    assert allocated() == floor
    # The hook of the shared decoder is the second pipeline's, and stays; the first one's model loses its own.
    gone = one.transformer
    of_diffusers.release(one)
    assert not hasattr(gone, "_hf_hook") and shared._hf_hook is two._all_hooks[-1].hook and one._all_hooks == []
    assert generate(two).ndim == 4
    # It was made first, so the hook of what they share is its own: no way leads from there to the model that is gone.
    three = pipeline(shared)
    three.enable_model_cpu_offload()
    gone = three.transformer
    of_diffusers.release(three)
    assert shared._hf_hook.prev_module_hook is None
    assert generate(two).ndim == 4
    of_diffusers.release(two)
    assert nothing_left() == floor


if __name__ == "__main__":
    main(globals())
