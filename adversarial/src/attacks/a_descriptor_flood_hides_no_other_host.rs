//! A caller that looks for hosts examines a limited number of descriptors, so that a flood costs
//! little. A member could fill that number with its own descriptors and hide all other hosts; with
//! many members, those whose keys sort first would win. Therefore only a few descriptors per host
//! count, and the hosts left out of a crowd do not depend on keys.

use std::collections::BTreeSet;

use hearthnet_orchestrator::router::{Candidate, Speeds};

use super::prelude::*;

/// Descriptors of the flood: more than are examined.
const FLOOD: u32 = 10_000;
/// Searches for hosts, each by a caller with a different process secret.
const LOOKS: usize = 8;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let fleet = Fleet::new(tokio::runtime::Handle::current(), None)?;
    let layers = (0, fleet.model().layers.saturating_sub(1));
    // Each covers one layer of a deeper model, so it is useless alone.
    let of_one = |n: u32| descriptor(&fleet, 0, (0, 0), n);
    let of_many = |n: u32| descriptor(&fleet, n, (0, 0), 0);
    let honest = || descriptor(&fleet, u32::MAX, layers, 1);
    let one: Vec<Candidate> = (0..FLOOD).map(of_one).chain([honest()]).collect();
    let seen = looks(&fleet, layers.1, &one);
    let told = "a flood of one member: the honest host";
    found.check(told, "seen", seen, seen == LOOKS);
    // A third more hosts than are examined: the honest host is found sometimes, but not always.
    let many: Vec<Candidate> = (0..FLOOD / 2).map(of_many).chain([honest()]).collect();
    let seen = looks(&fleet, layers.1, &many);
    let what = "a flood of many keys that all sort first: the honest host";
    found.check(what, "seen by some", seen, seen > 0);
    Ok(())
}

/// Number of callers that find a route over these candidates up to a layer.
fn looks(fleet: &Fleet, last: u32, candidates: &[Candidate]) -> usize {
    let finds = |_: &usize| {
        let choice = fleet.choice(NodeId::from_checked([255; 32]));
        let (none, speeds) = (BTreeSet::new(), Speeds::new());
        let route = choice.pick(candidates.to_vec(), 0..=last, &none, None, &speeds);
        route.is_ok()
    };
    (0..LOOKS).filter(finds).count()
}

/// Descriptor of the host with this number; its key sorts by the number.
fn descriptor(fleet: &Fleet, host: u32, (lo, hi): (u32, u32), at: u32) -> Candidate {
    let mut key = [0; 32];
    for (byte, of) in key.iter_mut().zip(host.to_be_bytes()) {
        *byte = of;
    }
    let descriptor = Descriptor {
        shard_id: Descriptor::shard_id(&fleet.model().model_id, lo, hi),
        layer_range: (lo, hi),
        advertised_at: at.into(),
        ..fleet.descriptor(NodeId::from_checked(key))
    };
    Candidate::new(descriptor, 1, false)
}
