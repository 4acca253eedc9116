//! A chat template with a sentence too many, or a tokenizer that reads words as others, turns a genuine
//! model against whoever asks it: the weights are what they were, and so is their identity. What a
//! model makes of text has an identity of its own, which `hearthnet model inspect` shows.

use std::path::Path;

use hearthnet_model::{ModelFile, TextId, WeightsId};
use hearthnet_testkit::TinyLlama;

use crate::{Bench, Findings, HarnessError};

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let folder = tempfile::tempdir()?;
    let path = TinyLlama::default().write(folder.path());
    let genuine = std::fs::read(&path)?;
    let (weights, text) = identities(&path)?;
    // Behind a key there are its type, of four bytes, and of a text its length, of eight.
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
        found.same(
            format!("the weights with another {what}"),
            weights,
            weights_now,
        );
        found.check(
            format!("the identity of the text with another {what}"),
            "another",
            text_now,
            text_now != text,
        );
    }
    Ok(())
}

fn identities(path: &Path) -> Result<(WeightsId, TextId), HarnessError> {
    let model = ModelFile::open(path)?;
    let text = model.gguf().text_id()?;
    Ok((model.manifest(&mut |_, _| {}).weights_id(), text))
}
