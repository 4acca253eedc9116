//! A node has so many sockets for calls and for gossip, and each key may have some of them. Whoever may
//! invite could let a crowd in that holds them all, and asks nothing. Whom a member has let in is counted
//! together with it: all of them have a quarter.

use super::no_member_fills_the_memory_of_calls::let_in;
use crate::raw::{Credentials, SWITCHING};
use crate::{Bench, Findings, HarnessError};

/// Keys that hold more than all sockets of either path, if each has what one key may have.
const CROWD: u32 = 50;
/// The paths, what one key may have of each, and what those who count together may, if those that it has
/// stay: of gossip a host keeps one for each key, and ends the others.
const PATHS: [(&str, usize, Option<usize>); 2] = [("/bus/v1", 8, Some(32)), ("/sync/v1", 3, None)];

pub(super) async fn run(bench: &mut Bench, found: &mut Findings) -> Result<(), HarnessError> {
    let [attacker, guest] = bench.members();
    let crowd = let_in(bench, found, &attacker, CROWD).await?;
    for (path, each, most) in PATHS {
        let mut held = Vec::new();
        for key in &crowd {
            let credentials = Credentials::of(&key.secret());
            for _ in 0..each {
                let mut socket = bench.secured_with(&credentials).await?;
                let answer = socket.upgrade_at(path).await?;
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
        let credentials = Credentials::of(&guest.secret());
        let mut socket = bench.secured_with(&credentials).await?;
        let answer = socket.upgrade_at(path).await?;
        let taken = answer.starts_with(SWITCHING);
        let what = format!("a neighbour at {path} meanwhile");
        found.check(what, "let in", answer.lines().next().unwrap_or_default(), taken);
    }
    bench.goes_on(found).await
}
