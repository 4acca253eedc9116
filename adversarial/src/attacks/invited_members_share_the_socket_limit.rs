//! A node has a limited number of sockets for calls and for gossip, with a limit per key. A member
//! that may invite could admit a crowd which holds all of them idle. Everyone that a member invited
//! therefore counts together with it and gets at most a quarter of the sockets.

use super::no_member_fills_the_replay_cache::let_in;
use super::prelude::*;

/// Keys that would hold all sockets of either path at the limit per key.
const CROWD: u32 = 50;
/// Path, attempts per key, and limit of a group where its sockets stay open. For gossip there is no
/// limit to check: a host keeps one socket per key and closes the others.
const PATHS: [(&str, usize, Option<usize>); 2] = [("/bus/v1", 8, Some(32)), ("/sync/v1", 3, None)];

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<()> {
    let [attacker, guest] = bench.members();
    let crowd = let_in(bench, found, &attacker, CROWD).await?;
    for (path, each, most) in PATHS {
        let mut held = Vec::new();
        for key in &crowd {
            for _ in 0..each {
                let (socket, answer) = bench.upgrade(key, path).await?;
                if !answer.starts_with(SWITCHING) {
                    break;
                }
                held.push(socket);
            }
        }
        let count = held.len();
        let what = format!("sockets of {path} that the crowd was given");
        match most {
            Some(most) => {
                let may = count > 0 && count <= most;
                found.check(what, format!("some, at most {most}"), count, may);
            }
            None => found.check(what, "some", count, count > 0),
        }
        let (_socket, answer) = bench.upgrade(&guest, path).await?;
        let taken = answer.starts_with(SWITCHING);
        let what = format!("a neighbour at {path} meanwhile");
        let seen = answer.lines().next().unwrap_or_default();
        found.check(what, "accepted", seen, taken);
    }
    bench.still_works(found).await
}
