//! Whether measurements differ so much from the announced ones that members should hear of it. Pure.

use std::collections::BTreeMap;

use hearthnet_bus::log::Measured;

/// Least change of a number that is announced before its time, in per cent of the larger one.
const CHANGE_PERCENT: u64 = 10;

/// Whether a number changed by more than 10%, or a model or a link is new or gone.
pub(super) fn is_news(before: &Measured, now: &Measured) -> bool {
    let differs = |(a, b): (u64, u64)| {
        let change = a.abs_diff(b).saturating_mul(100);
        change > a.max(b).saturating_mul(CHANGE_PERCENT)
    };
    let (old, new) = (numbers(before), numbers(now));
    !old.keys().eq(new.keys()) || old.into_values().zip(new.into_values()).any(differs)
}

/// All numbers, by what they are about.
fn numbers(of: &Measured) -> BTreeMap<(&'static str, &[u8]), u64> {
    let mut all = BTreeMap::from([
        (("memory", &[][..]), of.memory_bytes),
        (("online", &[][..]), u64::from(of.online_permille)),
    ]);
    for model in &of.models {
        all.insert(("head", &model.weights), model.head_us.into());
        all.insert(("layer", &model.weights), model.layer_us.into());
        all.insert(("step", &model.weights), model.step_us.into());
        all.insert(("prefill", &model.weights), model.prefill_row_us.into());
    }
    for link in &of.links {
        all.insert(("delay", link.node.as_bytes()), link.delay_us.into());
        all.insert(("bandwidth", link.node.as_bytes()), link.kbit_s.into());
    }
    all
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::log::{LinkSpeed, ModelSpeed};
    use hearthnet_bus::testing::id;

    use super::*;

    fn measured() -> Measured {
        Measured {
            links: vec![LinkSpeed {
                node: id(1),
                kbit_s: 0,
                delay_us: 300,
            }],
            models: vec![ModelSpeed {
                head_us: 0,
                step_us: 0,
                weights: [7; 32],
                layer_us: 1_000,
                prefill_row_us: 100,
            }],
            running_s: 60,
            memory_bytes: 1 << 30,
            online_permille: 500,
        }
    }

    #[test]
    fn small_changes_are_no_news() {
        let mut now = measured();
        assert!(!is_news(&measured(), &now));
        now.models[0].layer_us = 1_100;
        now.links[0].delay_us = 275;
        assert!(!is_news(&measured(), &now));
    }

    #[test]
    fn each_larger_change_is_news() {
        let changes: [fn(&mut Measured); 8] = [
            |it| it.memory_bytes = 900 << 20,
            |it| it.online_permille = 600,
            |it| it.models[0].layer_us = 1_120,
            |it| it.models[0].head_us = 1,
            |it| it.models[0].weights = [8; 32],
            |it| it.models.clear(),
            |it| it.links[0].kbit_s = 1_000,
            |it| it.links.clear(),
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut now = measured();
            change(&mut now);
            assert!(is_news(&measured(), &now), "{index}");
        }
    }
}
