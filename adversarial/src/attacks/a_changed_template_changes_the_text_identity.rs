//! A chat template with an added sentence, or a tokenizer that maps words to other tokens, turns a
//! genuine model against its user, while weights and weight identity stay the same. Template and
//! tokenizer have an identity of their own, which `hearthnet model inspect` shows.

use std::path::Path;

use hearthnet_files::{ModelFile, TextId, WeightsId};

use super::prelude::*;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = TinyLlama::default().write(folder.path());
    let genuine = std::fs::read(&path)?;
    let (weights, text) = identities(&path)?;
    // A key is followed by its type (4 bytes); text values also have a length (8 bytes).
    for (what, key, behind) in [
        ("template", "tokenizer.chat_template", 12),
        ("end of an answer", "tokenizer.ggml.eos_token_id", 4),
        ("first token", "tokenizer.ggml.tokens", 4 + 4 + 8 + 8),
    ] {
        let mut changed = genuine.clone();
        let at = genuine.windows(key.len()).position(|w| w == key.as_bytes());
        let byte = at.and_then(|at| changed.get_mut(at + key.len() + behind));
        *byte.ok_or_else(|| HarnessError::attacker(format!("the model has no {what}")))? ^= 1;
        std::fs::write(&path, changed)?;
        let (weights_now, text_now) = identities(&path)?;
        let claim = format!("the weights with another {what}");
        found.same(claim, weights, weights_now);
        let what = format!("the identity of the text with another {what}");
        found.check(what, "another", text_now, text_now != text);
    }
    Ok(())
}

fn identities(path: &Path) -> Result<(WeightsId, TextId)> {
    let model = ModelFile::open(path)?;
    let text = model.gguf().text_id()?;
    Ok((model.manifest(&mut |_, _| {}).weights_id(), text))
}
