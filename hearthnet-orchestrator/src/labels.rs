//! Labels of numbers, when their values are not this program's own.

use std::collections::BTreeSet;

use parking_lot::Mutex;

/// Most shards with a name of their own. Each costs a histogram; more ranges than these in one
/// process are an experiment, or a host that advertises another one every minute.
const MOST: usize = 64;

/// The name under which a shard is counted: its own, or `other` when too many have one.
pub(crate) fn shard(shard_id: String) -> String {
    static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // A set is whole between any two of its operations.
    let mut names = NAMES.lock();
    admit(&mut names, shard_id)
}

fn admit(names: &mut BTreeSet<String>, shard_id: String) -> String {
    if names.contains(&shard_id) {
        return shard_id;
    }
    if names.len() >= MOST {
        return "other".to_owned();
    }
    names.insert(shard_id.clone());
    shard_id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_cannot_make_more_numbers_than_there_is_room_for() {
        let mut names = BTreeSet::new();
        let counted: BTreeSet<String> = (0..1000)
            .map(|n| admit(&mut names, format!("model:0-{n}")))
            .collect();
        assert_eq!(counted.len(), MOST + 1);
        assert_eq!(admit(&mut names, "model:0-3".into()), "model:0-3");
    }
}
