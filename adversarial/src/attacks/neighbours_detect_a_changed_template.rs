//! A file is passed on with the genuine weights and a changed chat template. A home that serves its
//! layers beside others would not notice, because the weights match. Hosts therefore announce the
//! text identity of their files, so that neighbours detect the difference.

use hearthnet_bus::log::Advert;
use hearthnet_orchestrator::coverage::by_model;
use hearthnet_shard::{ShardConfig, ShardHost};

use super::prelude::*;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let genuine = TinyLlama::default().write(folder.path());
    let mut changed = std::fs::read(&genuine)?;
    // The key is followed by its type (4 bytes) and its length (8 bytes).
    let key = "tokenizer.chat_template";
    let at = changed.windows(key.len()).position(|w| w == key.as_bytes());
    let byte = at.and_then(|at| changed.get_mut(at + key.len() + 12));
    *byte.ok_or_else(|| HarnessError::attacker("the model has no template"))? ^= 1;
    let backdoor = folder.path().join("passed-on.gguf");
    std::fs::write(&backdoor, changed)?;

    let mut adverts = Vec::new();
    for path in [&genuine, &genuine, &backdoor] {
        let key: NodeKey = new_key()?;
        let config = ShardConfig::new(path, (0, 1), "127.0.0.1:0");
        let host = ShardHost::start(config, &key, |_| {}).await;
        let host = host?;
        let encoded = host.descriptor().to_cbor()?;
        adverts.push(Advert {
            author: key.id(),
            // Decoded from its wire form.
            descriptor: Descriptor::from_cbor(&encoded)?,
            expires_ms: u64::MAX,
        });
    }
    let models = by_model(adverts.iter(), |_| true);
    found.same("models by their weights", 1, models.len());
    let texts: Vec<_> = models.iter().flat_map(|model| model.by_text()).collect();
    found.same("tokenizers and templates of these weights", 2, texts.len());
    let alone = |advert: &Advert| {
        texts
            .iter()
            .any(|(_, hosts)| hosts.len() == 1 && hosts.contains(&advert.author))
    };
    let told: Vec<bool> = adverts.iter().map(alone).collect();
    let apart = told == [false, false, true];
    let what = "the host with the changed template";
    found.check(what, "the third", format!("{told:?}"), apart);
    Ok(())
}
