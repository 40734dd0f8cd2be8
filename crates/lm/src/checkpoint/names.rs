//! Tensor names as the model knows them: those of Hugging Face's text models.

/// The text model's name of a tensor or module of a checkpoint, which may be a multimodal wrapper, or `None` for what the
/// text model does not have: vision parts, and rotary frequencies that old files store though they follow from the
/// configuration.
pub(crate) fn canonical(name: &str) -> Option<String> {
    if name.ends_with(ROTARY) {
        return None;
    }
    // transformers 5 has `model.language_model.` where transformers 4 and MLX have `language_model.model.`.
    let name = match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("model.{rest}"),
        None => name.strip_prefix("language_model.").unwrap_or(name).to_owned(),
    };
    let inner = name.strip_prefix("model.").unwrap_or(&name);
    let vision = ["vision_tower.", "multi_modal_projector.", "vision_model.", "visual."];
    if vision.iter().any(|part| inner.starts_with(part)) {
        return None;
    }
    Some(name)
}

/// The ending of rotary frequencies.
pub(super) const ROTARY: &str = ".rotary_emb.inv_freq";

/// GGUF modules outside the layers, with Hugging Face's names.
const GLOBAL: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// GGUF modules of layer `blk.N`, with Hugging Face's names in `model.layers.N`.
const IN_LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_norm", "post_attention_layernorm"),
];

/// Hugging Face's name for a tensor of a GGUF file, or the GGUF name itself if it has none.
pub(super) fn from_gguf(name: &str, architecture: &str) -> String {
    hugging_face_name(name, architecture).unwrap_or_else(|| name.to_owned())
}

fn hugging_face_name(name: &str, architecture: &str) -> Option<String> {
    let (module, kind) = name.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias"))?;
    if let Some((_, name)) = GLOBAL.iter().find(|(gguf, _)| *gguf == module) {
        return Some(format!("{name}.{kind}"));
    }
    let (layer, module) = module.strip_prefix("blk.")?.split_once('.')?;
    // What differs between architectures: Gemma's four norms, and Phi's fused gate and up.
    let module = match (architecture, module) {
        ("gemma2" | "gemma3", "post_attention_norm") => "post_attention_layernorm",
        ("gemma2" | "gemma3", "ffn_norm") => "pre_feedforward_layernorm",
        ("gemma2" | "gemma3", "post_ffw_norm") => "post_feedforward_layernorm",
        ("phi3", "ffn_up") => "mlp.gate_up_proj",
        _ => IN_LAYER.iter().find(|(gguf, _)| *gguf == module)?.1,
    };
    Some(format!("model.layers.{layer}.{module}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappers_and_their_vision_parts() {
        let cases = [
            ("model.layers.0.mlp.up_proj.weight", Some("model.layers.0.mlp.up_proj.weight")),
            ("language_model.model.norm.weight", Some("model.norm.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            (
                "model.language_model.layers.1.input_layernorm.weight",
                Some("model.layers.1.input_layernorm.weight"),
            ),
            ("vision_tower.vision_model.embeddings.patch.weight", None),
            ("model.vision_tower.encoder.weight", None),
            ("multi_modal_projector.mm_soft_emb_norm.weight", None),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ];
        for (name, wanted) in cases {
            assert_eq!(canonical(name).as_deref(), wanted, "{name}");
        }
    }

    #[test]
    fn gguf_names() {
        assert_eq!(from_gguf("token_embd.weight", "llama"), "model.embed_tokens.weight");
        assert_eq!(from_gguf("blk.11.attn_q.bias", "qwen2"), "model.layers.11.self_attn.q_proj.bias");
        assert_eq!(
            from_gguf("blk.0.ffn_norm.weight", "llama"),
            "model.layers.0.post_attention_layernorm.weight"
        );
        assert_eq!(
            from_gguf("blk.0.ffn_norm.weight", "gemma3"),
            "model.layers.0.pre_feedforward_layernorm.weight"
        );
        assert_eq!(from_gguf("blk.0.ffn_up.weight", "phi3"), "model.layers.0.mlp.gate_up_proj.weight");
        assert_eq!(from_gguf("rope_freqs.weight", "llama"), "rope_freqs.weight");
    }
}
