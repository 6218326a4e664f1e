# SPDX-License-Identifier: Apache-2.0
"""Each model family at tiny size, for the shared checks."""

import torch
from diffusers import (
    ChromaTransformer2DModel,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SanaVideoTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)

from mhla_hf import (
    MHLAChromaTransformer2DModel,
    MHLADiTTransformer2DModel,
    MHLAFluxTransformer2DModel,
    MHLAHunyuanVideo15Transformer3DModel,
    MHLAHunyuanVideoTransformer3DModel,
    MHLALTX2VideoTransformer3DModel,
    MHLALTXVideoTransformer3DModel,
    MHLAPixArtTransformer2DModel,
    MHLAQwenImageTransformer2DModel,
    MHLASanaTransformer2DModel,
    MHLASanaVideoTransformer3DModel,
    MHLASkyReelsV2Transformer3DModel,
    MHLAWanAnimateTransformer3DModel,
    MHLAWanTransformer3DModel,
    MHLAWanVACETransformer3DModel,
)
from tests import tiny, tiny_images, tiny_joint
from tests.models.model_case import ModelCase


class WanCase(ModelCase):
    """Text-to-video; latents of 3×4×8 are a token grid of 3×2×4."""

    upstream = WanTransformer3DModel
    mhla_class = MHLAWanTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    thorough = True
    image_to_video = False
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))

    def make(self, cls=None, **overrides):
        return tiny.wan_transformer(cls, image_to_video=self.image_to_video, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny.wan_inputs(
            frames=frames, height=height, width=width, image_to_video=self.image_to_video, **options
        )


class WanImageToVideoCase(WanCase):
    """With image cross-attention."""

    image_to_video = True

    def inputs(self, size=0, **options):
        # The model tells image tokens from text by assuming 512 of text.
        return super().inputs(size, **{"text_tokens": 512, **options})


class WanVACECase(WanCase):
    """Two blocks of Wan and a control block, whose layer is the third."""

    upstream = WanVACETransformer3DModel
    mhla_class = MHLAWanVACETransformer3DModel
    thorough = False

    def make(self, cls=None, **overrides):
        sizes = {"vace_layers": [0], "vace_in_channels": 6, **overrides}
        return tiny.wan_transformer(cls or self.upstream, **sizes)

    def inputs(self, size=0, **options):
        inputs = super().inputs(size, **options)
        latents = inputs["hidden_states"]
        return {**inputs, "control_hidden_states": latents[:, :6].flip(1) + 0.5}


class SkyReelsCase(WanCase):
    """Text-to-video."""

    upstream = SkyReelsV2Transformer3DModel
    mhla_class = MHLASkyReelsV2Transformer3DModel
    thorough = False

    def make(self, cls=None, **overrides):
        return super().make(cls or self.upstream, **overrides)


class WanAnimateCase(WanImageToVideoCase):
    """The first frame of latents is the reference image."""

    upstream = WanAnimateTransformer3DModel
    mhla_class = MHLAWanAnimateTransformer3DModel
    thorough = False
    sizes = ((3, 4, 8), (2, 6, 8), (5, 6, 14))

    def make(self, cls=None, **overrides):
        sizes = {"motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4}, "motion_encoder_size": 16}
        sizes |= {"motion_style_dim": 4, "motion_dim": 2, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 8}
        sizes |= {"face_encoder_num_heads": 2, "inject_face_latents_blocks": 1}
        return super().make(cls or self.upstream, **{**sizes, **overrides})

    def inputs(self, size=0, **options):
        inputs = super().inputs(size, **options)
        latents = inputs["hidden_states"]
        batch, _, frames, _, _ = latents.shape
        # Four frames of the face for each latent frame after the first of them.
        face = torch.linspace(-1, 1, 3 * (4 * frames - 7) * 16 * 16).view(1, 3, -1, 16, 16)
        face = face.repeat(batch, 1, 1, 1, 1).to(latents.dtype)
        return {**inputs, "pose_hidden_states": latents[:, :16, 1:].flip(1), "face_pixel_values": face}


class LTXCase(ModelCase):
    """Every latent of a video is a token."""

    upstream = LTXVideoTransformer3DModel
    mhla_class = MHLALTXVideoTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    block_list = "transformer_blocks"
    # Frames, height and width of the latents.
    sizes = ((3, 2, 4), (1, 4, 6), (5, 3, 7))

    def make(self, cls=None, **overrides):
        return tiny.ltx_transformer(cls, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny.ltx_inputs(frames=frames, height=height, width=width, **options)


class LTX2Case(LTXCase):
    """Video with audio; predictions are those of both."""

    upstream = LTX2VideoTransformer3DModel
    mhla_class = MHLALTX2VideoTransformer3DModel

    def make(self, cls=None, **overrides):
        return tiny.ltx2_transformer(cls, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny.ltx2_inputs(frames=frames, height=height, width=width, **options)

    def predict(self, model, **inputs):
        # Hooks of accelerate fail on the output object, of the stock model too.
        video, audio = model(**inputs, return_dict=False)
        return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)


class LTX23Case(LTX2Case):
    """With rotary halves, gates of heads and perturbed attention."""

    def make(self, cls=None, **overrides):
        return super().make(cls, **{**tiny.LTX23, **overrides})

    def inputs(self, size=0, **options):
        return super().inputs(size, text_dims=(32, 16), **options)


class DiTCase(ModelCase):
    """Latents of 8×12 are a token grid of 4×6."""

    upstream = DiTTransformer2DModel
    mhla_class = MHLADiTTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    thorough = True
    block_list = "transformer_blocks"
    # Square images only.
    upstream_size = (8, 8)
    # Height and width of the latents.
    sizes = ((8, 12), (4, 24), (10, 14))

    def make(self, cls=None, **overrides):
        model = tiny_images.dit_transformer(cls, **overrides)
        for block in model.transformer_blocks:
            # Labels are dropped at random in training: two runs would not be the same.
            block.norm1.emb.class_embedder.dropout_prob = 0
        return model

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.dit_inputs(height=height, width=width, **options)


class PixArtCase(ModelCase):
    """Latents of 8×12 are a token grid of 4×6."""

    upstream = PixArtTransformer2DModel
    mhla_class = MHLAPixArtTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    block_list = "transformer_blocks"
    # Height and width of the latents.
    sizes = ((8, 12), (4, 24), (10, 14))

    def make(self, cls=None, **overrides):
        return tiny_images.pixart_transformer(cls, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.pixart_inputs(height=height, width=width, **options)


class SanaCase(ModelCase):
    """Every latent is a token."""

    upstream = SanaTransformer2DModel
    mhla_class = MHLASanaTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    block_list = "transformer_blocks"
    sprint = False
    # Height and width of the latents.
    sizes = ((4, 6), (2, 12), (5, 7))

    def make(self, cls=None, **overrides):
        return tiny_images.sana_transformer(cls, sprint=self.sprint, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.sana_inputs(height=height, width=width, sprint=self.sprint, **options)


class SanaSprintCase(SanaCase):
    """With norms of queries and keys, and the guidance scale as an input."""

    sprint = True


class SanaVideoCase(ModelCase):
    """Latents of 3×4×8 are a token grid of 3×2×4."""

    upstream = SanaVideoTransformer3DModel
    mhla_class = MHLASanaVideoTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    block_list = "transformer_blocks"
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))

    def make(self, cls=None, **overrides):
        return tiny_images.sana_video_transformer(cls, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_images.sana_video_inputs(frames=frames, height=height, width=width, **options)


class JointCase(ModelCase):
    """Joint attention, whose layers give the text an output as well."""

    block_list = "transformer_blocks"
    attention = "attn"
    untrained = (".normalizer_scale",)

    def silence(self, model, layer):
        attention = self.mhla_class._self_attentions(model)[layer]
        if getattr(attention, "to_add_out", None) is not None:
            attention.to_out[0].weight.data.zero_(), attention.to_add_out.weight.data.zero_()
            return
        # A block with a single stream: its own projection takes the heads.
        width = attention.to_v.out_features
        block = model.single_transformer_blocks[layer - len(model.transformer_blocks)]
        block.proj_out.weight.data[:, :width] = 0


class HunyuanVideoCase(JointCase):
    """Two blocks with two streams and two with a single stream; latents of 3×4×8 are a token grid of 3×2×4."""

    upstream = HunyuanVideoTransformer3DModel
    mhla_class = MHLAHunyuanVideoTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))

    def make(self, cls=None, **overrides):
        return tiny_joint.hunyuan_video(cls or self.upstream, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_joint.hunyuan_video_inputs(frames=frames, height=height, width=width, **options)


class HunyuanVideo15Case(JointCase):
    """Two blocks with two streams; every latent is a token."""

    upstream = HunyuanVideo15Transformer3DModel
    mhla_class = MHLAHunyuanVideo15Transformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    # What the last block makes of the text.
    unused = ("attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q", "ff_context")
    sizes = ((3, 2, 4), (1, 4, 6), (5, 3, 7))

    def make(self, cls=None, **overrides):
        return tiny_joint.hunyuan_video_15(cls or self.upstream, **overrides)

    def inputs(self, size=0, **options):
        frames, height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_joint.hunyuan_video_15_inputs(frames=frames, height=height, width=width, **options)


class QwenImageCase(JointCase):
    """Two blocks with two streams; the height and width of the grid."""

    upstream = QwenImageTransformer2DModel
    mhla_class = MHLAQwenImageTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    # What the last block makes of the text.
    unused = ("attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q", "txt_mlp")
    sizes = ((4, 6), (2, 12), (5, 7))

    def make(self, cls=None, **overrides):
        return tiny_joint.qwen_image(cls or self.upstream, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_joint.qwen_image_inputs(height=height, width=width, **options)


class FluxCase(JointCase):
    """Two blocks with two streams and two with a single stream; the height and width of the grid."""

    upstream = FluxTransformer2DModel
    mhla_class = MHLAFluxTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    sizes = ((4, 6), (2, 12), (5, 7))

    def make(self, cls=None, **overrides):
        return tiny_joint.flux(cls or self.upstream, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_joint.flux_inputs(height=height, width=width, **options)


class ChromaCase(FluxCase):
    """As Flux; the text is padded."""

    upstream = ChromaTransformer2DModel
    mhla_class = MHLAChromaTransformer2DModel

    def make(self, cls=None, **overrides):
        return tiny_joint.chroma(cls or self.upstream, **overrides)

    def inputs(self, size=0, **options):
        height, width = self.sizes[size] if isinstance(size, int) else size
        return tiny_joint.chroma_inputs(height=height, width=width, **options)


CASES = [WanCase(), DiTCase(), PixArtCase(), SanaCase(), SanaVideoCase()]
CASES += [WanVACECase(), WanAnimateCase(), SkyReelsCase(), LTXCase(), LTX2Case()]
CASES += [HunyuanVideoCase(), HunyuanVideo15Case(), QwenImageCase(), FluxCase(), ChromaCase()]
"""A case of every class."""
