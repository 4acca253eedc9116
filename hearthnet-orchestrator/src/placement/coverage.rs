//! Coverage of models by the community: advertisements grouped by model.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::Advert;

use super::{Held, missing};

/// Model, and the hosts that serve its layers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Coverage<'a> {
    /// Catalogue ids or file stems, most frequent first: the same weights may be stored under
    /// several names.
    pub names: Vec<&'a str>,
    pub weights: &'a str,
    /// Number of layers of the whole model.
    pub total: u32,
    /// Advertisements, by first layer.
    pub shards: Vec<&'a Advert>,
    /// Layers that no reachable host serves.
    pub missing: Vec<(u32, u32)>,
}

impl<'a> Coverage<'a> {
    /// Hosts by the identity of the tokenizer and chat template in their files
    /// (`specs/weights-identity.md`), if they advertise it. If there is more than one, some files
    /// turn the same text into other tokens.
    pub fn by_text(&self) -> BTreeMap<&'a str, BTreeSet<NodeId>> {
        let mut texts: BTreeMap<&str, BTreeSet<NodeId>> = BTreeMap::new();
        for advert in &self.shards {
            if let Some(text) = advert.descriptor.text_id() {
                texts.entry(text).or_default().insert(advert.author);
            }
        }
        texts
    }
}

/// Groups advertisements by weights: two files with the same name are two models, and one model
/// under two names is one. `answers` tells whether a host is reachable, as far as known.
pub fn by_model<'a>(
    adverts: impl Iterator<Item = &'a Advert>,
    answers: impl Fn(&NodeId) -> bool,
) -> Vec<Coverage<'a>> {
    let mut models: BTreeMap<(&str, u32), Vec<&Advert>> = BTreeMap::new();
    for advert in adverts {
        let d = &advert.descriptor;
        models
            .entry((&d.weights_sha256, d.total_layers))
            .or_default()
            .push(advert);
    }
    models
        .into_iter()
        .map(|((weights, total), mut shards)| {
            shards.sort_by_key(|a| (a.descriptor.layer_range, a.author));
            let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
            for advert in &shards {
                *uses.entry(&advert.descriptor.model_id).or_default() += 1;
            }
            let mut names: Vec<&str> = uses.keys().copied().collect();
            names.sort_by_key(|name| std::cmp::Reverse(uses.get(name).copied()));
            let there = shards.iter().filter(|a| answers(&a.author));
            let ranges: Vec<_> = there.map(|a| a.descriptor.layer_range).collect();
            Coverage {
                names,
                weights,
                total,
                missing: missing(total, &ranges),
                shards,
            }
        })
        .collect()
}

/// Layers of a model that hosts other than `own` serve.
pub fn held_by_others<'a>(
    adverts: impl Iterator<Item = &'a Advert>,
    own: NodeId,
    weights: &str,
    total: u32,
) -> Vec<Held> {
    adverts
        .filter(|a| a.author != own && a.descriptor.weights_sha256 == weights)
        .filter(|a| a.descriptor.total_layers == total)
        .map(|a| Held {
            node: a.author,
            range: a.descriptor.layer_range,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::{Descriptor, NodeKey};

    use super::*;
    use crate::tests::descriptor;

    fn advert(seed: u8, model: &str, weights: &str, lo: u32, hi: u32) -> Advert {
        Advert {
            author: NodeKey::from_secret(&[seed; 32]).id(),
            expires_ms: 0,
            descriptor: Descriptor {
                weights_sha256: weights.into(),
                ..descriptor(model, NodeId::from_checked([1; 32]), lo, hi, 30)
            },
        }
    }

    #[test]
    fn each_model_lists_its_shards_in_order_and_its_missing_layers() {
        let all = [
            advert(1, "m", "a", 20, 29),
            advert(2, "m", "a", 0, 9),
            advert(3, "n", "c", 0, 29),
        ];
        let models = by_model(all.iter(), |_| true);
        assert_eq!(models.len(), 2);
        assert_eq!(models[0].shards, [&all[1], &all[0]]);
        assert_eq!(models[0].missing, [(10, 19)]);
        assert_eq!(models[1].missing, []);
    }

    #[test]
    fn one_model_under_two_file_names_is_one_model() {
        let all = [
            advert(1, "smollm2", "a", 0, 14),
            advert(2, "SmolLM2.Q4", "a", 15, 29),
            advert(3, "smollm2", "a", 15, 29),
        ];
        let models = by_model(all.iter(), |_| true);
        assert_eq!(models.len(), 1);
        assert_eq!(models[0].names, ["smollm2", "SmolLM2.Q4"]);
        assert_eq!(models[0].missing, []);
    }

    #[test]
    fn unreachable_hosts_do_not_cover_layers() {
        let all = [advert(1, "m", "a", 0, 14), advert(2, "m", "a", 15, 29)];
        let models = by_model(all.iter(), |host| *host != all[1].author);
        assert_eq!(models[0].missing, [(15, 29)]);
        assert_eq!(models[0].shards.len(), 2);
    }

    #[test]
    fn hosts_with_different_tokenizers_are_told_apart() {
        let says = |seed, text: &str| {
            let mut one = advert(seed, "m", "a", 0, 29);
            one.descriptor.software = format!("hearthnet/0.1.0{text}");
            one
        };
        let all = [
            says(1, " text/aa"),
            says(2, ""),
            says(3, " text/bb"),
            says(4, " text/aa"),
        ];
        let models = by_model(all.iter(), |_| true);
        let texts = models[0].by_text();
        let of = |text: &str| texts[text].iter().copied().collect::<Vec<_>>();
        let mut same = vec![all[0].author, all[3].author];
        same.sort();
        assert_eq!((texts.len(), of("aa")), (2, same));
        assert_eq!(of("bb"), [all[2].author]);
    }

    #[test]
    fn other_weights_of_the_same_name_fill_no_gap() {
        let all = [advert(1, "m", "a", 0, 14), advert(2, "m", "b", 15, 29)];
        let models = by_model(all.iter(), |_| true);
        assert_eq!(models.len(), 2);
        assert_eq!(models[0].missing, [(15, 29)]);
        let own = all[0].author;
        assert_eq!(held_by_others(all.iter(), own, "a", 30), []);
        assert_eq!(held_by_others(all.iter(), own, "b", 30).len(), 1);
    }
}
