//! An auditing host returns a wrong row, and then preempts the stream or leaves, so that another host
//! computes the rest. If the caller took the rows of both for an audit, it would blame the second
//! host, and the claims of that host would contradict nothing: the caller would be a false accuser. So
//! it drops these rows, and asks another host.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hearthnet_bus::log::Finding;
use hearthnet_shard::StreamFault;

use super::a_steering_host_is_convicted_by_a_third_node::{Trial, audited_fleet};
use super::prelude::*;

/// How the auditing host ends the stream.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Preempts,
    /// As a host does that its owner stops: it asks its callers to move.
    Leaves,
}

/// Time that the leaving host takes for a step, so that its news arrives before its last rows.
const SLOW: Duration = Duration::from_millis(100);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, |runtime, found| {
        let mut fleet = audited_fleet(runtime)?;
        // All rows come back, and an audit takes several steps.
        fleet.private_last = 1;
        fleet.pump.prefill_rows = 8;
        audit(&fleet, "preempts", End::Preempts, found)?;
        audit(&fleet, "leaves", End::Leaves, found)
    })
    .await
}

fn audit(fleet: &Fleet, what: &str, end: End, found: &mut Findings) -> Result<()> {
    let [caller, honest, liar, other] = [new_key()?, new_key()?, new_key()?, new_key()?];
    let secret = caller.secret();
    let ids = [honest.id(), liar.id(), other.id()];
    let (lied, lies) = channel();
    let mut steps = 0;
    let tamper: Tamper = Box::new(move |passing| {
        steps += 1;
        match (steps, end) {
            (1, _) => {
                passing.rows.iter_mut().for_each(|value| *value += 0.01);
                // The receiver is gone if the attack has ended.
                let _ = lied.send(());
            }
            (2, _) => {}
            (_, End::Preempts) => *passing.fault = Some(StreamFault::Preempted),
            (_, End::Leaves) => {}
        }
        if end == End::Leaves {
            std::thread::sleep(SLOW);
        }
    });
    let all = vec![(honest, unchanged()), (liar, tamper), (other, unchanged())];
    let mut hosts = fleet.hosts(caller, all)?;
    let [honest, liar, other] = ids;
    hosts.order = ids.to_vec();
    let evidence = hosts.evidence();
    let begin = Instant::now();
    fleet.ask_over(&hosts, 1, TOKENS)?;
    found.holds(
        format!("{what}: the auditor returns a wrong row"),
        "yes",
        lies.recv_timeout(AUDIT_TIMEOUT).is_ok(),
    );
    if end == End::Leaves {
        fleet.leave(&mut hosts, liar);
    }
    let first = hosts.audited(honest, 0)?;
    found.holds(format!("{what}: the answer is audited"), "yes", first > 0);
    // Audits run one after the other: once the second one has a result, the first one is over.
    fleet.ask_over(&hosts, 1, TOKENS)?;
    hosts.audited(honest, first)?;

    for evidence in evidence.try_iter() {
        // Only a liar that has returned all rows before it left can be accused.
        let layers = evidence.accused.statement.layers;
        let finding = fleet.finding(&evidence, layers)?;
        found.same(
            format!("{what}: what the evidence shows"),
            Finding::Witness,
            finding,
        );
        if end == End::Leaves && finding == Finding::Witness {
            let trial = Trial::about(NodeKey::from_secret(&secret), liar, honest, evidence)?;
            trial.convicts(fleet, found)?;
        }
    }
    for (name, host) in [("audited", honest), ("next", other)] {
        let what = format!("{what}: the caller trusts the {name} host");
        found.holds(what, "yes", hosts.is_good(host));
    }
    found.detected(begin.elapsed());
    Ok(())
}
