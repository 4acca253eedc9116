//! A host can read the rows that it computes, so a host that wants to read all chats need only be
//! chosen for all of them. Claims are free: all layers, no load, a key that sorts first or that a
//! known hash favours. Here a host has searched such a key for one caller, whose id is known from
//! the log. Whatever it claims, other capable hosts get their part.

use super::prelude::*;

/// Questions that are asked; the attacker may get half.
const CHATS: usize = 10;
/// Honest hosts besides the attacker.
const HONEST: usize = 3;
/// Keys that are tried.
const KEYS: usize = 256;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    for (what, first) in [
        ("the lowest key", lowest as fn(NodeId, NodeId) -> u64),
        ("a key chosen for a public hash", hashed),
    ] {
        let runtime = Handle::current();
        let drawn = tokio::task::spawn_blocking(move || drawn(runtime, first));
        let drawn = drawn.await??;
        let expected = format!("at most {} of {CHATS} chats", CHATS / 2);
        found.check(what, expected, drawn, drawn <= CHATS / 2);
    }
    Ok(())
}

/// Number of chats of a host whose key was chosen to minimise `place`.
fn drawn(runtime: Handle, place: fn(NodeId, NodeId) -> u64) -> Result<usize> {
    let fleet = Fleet::new(runtime, None)?;
    let caller = new_key()?;
    let ground: Result<Vec<NodeKey>> = (0..KEYS).map(|_| new_key()).collect();
    let ground = ground?.into_iter();
    let ground = ground.min_by_key(|key| place(caller.id(), key.id()));
    let ground = ground.ok_or_else(|| HarnessError::attacker("no key"))?;
    let attacker = ground.id().to_string();
    let mut hosts = vec![(ground, unchanged())];
    for _ in 0..HONEST {
        hosts.push((new_key()?, unchanged()));
    }
    let hosts = fleet.hosts(caller, hosts)?;
    let mut drawn = 0;
    for _ in 0..CHATS {
        // Too few tokens to measure a speed.
        let asked = fleet.ask_over(&hosts, 1, 2)?;
        let mut route = asked.done.route.iter();
        drawn += usize::from(route.any(|hop| hop.host.as_ref() == Some(&attacker)));
    }
    Ok(drawn)
}

/// First bytes of the key.
fn lowest(_: NodeId, host: NodeId) -> u64 {
    let bytes = host.as_bytes().iter().take(8);
    bytes.fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
}

/// FNV-1a over both ids, a tie-break that the host can compute.
fn hashed(caller: NodeId, host: NodeId) -> u64 {
    let (caller, host) = (caller.to_string(), host.to_string());
    let bytes = caller.bytes().chain([0]).chain(host.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
