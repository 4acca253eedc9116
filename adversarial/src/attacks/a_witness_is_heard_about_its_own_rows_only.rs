//! In the second turn of a chat, an auditing host returns one wrong row. Steps of a second turn begin
//! anywhere, so an audit that cut the rows from position 0 on would have the wrong row in another claim
//! than the one that ends with the audited host's. Evidence of that claim convicts no host, and the
//! caller would be a false accuser. So an audit cuts rows where the audited host's claims begin, and
//! the caller announces nothing unless the witness claims all rows of the wrong claim.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use super::a_steering_host_is_convicted_by_a_third_node::{Trial, audited_fleet};
use super::prelude::*;

/// Rows of a step.
const STEP: u32 = 3;
/// Position of the wrong row: in the first step of the second turn, [`PROMPT`] to `PROMPT + 2`, but with
/// steps from position 0 on, in one that ends before that.
const WRONG: u32 = PROMPT + 1;

const _: () = assert!(
    PROMPT % STEP == 1,
    "the step before ends behind the wrong row"
);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, |runtime, found| {
        let mut fleet = audited_fleet(runtime)?;
        // All rows come back.
        fleet.private_last = 1;
        fleet.pump.prefill_rows = STEP as usize;
        let [caller, honest, liar, other] = [new_key()?, new_key()?, new_key()?, new_key()?];
        let secret = caller.secret();
        let ids = [honest.id(), liar.id(), other.id()];

        let second_turn = Arc::new(AtomicBool::new(false));
        let (is_second, began) = (Arc::clone(&second_turn), Arc::new(AtomicU32::new(u32::MAX)));
        let lowest = Arc::clone(&began);
        let watch: Tamper = Box::new(move |passing| {
            if is_second.load(Ordering::SeqCst) {
                for span in passing.spans {
                    lowest.fetch_min(span.position, Ordering::SeqCst);
                }
            }
        });
        let (is_second, width) = (Arc::clone(&second_turn), fleet.width());
        let lie: Tamper = Box::new(move |passing| {
            let mut before = 0;
            for span in passing.spans {
                let row = WRONG.checked_sub(span.position);
                if let Some(row) = row.filter(|row| *row < span.rows)
                    && is_second.load(Ordering::SeqCst)
                    && let Some(value) = passing.rows.get_mut((before + row) as usize * width)
                {
                    *value += 0.01;
                }
                before += span.rows;
            }
        });
        let mut hosts = fleet.hosts(
            caller,
            vec![(honest, watch), (liar, lie), (other, unchanged())],
        )?;
        let [honest, liar, other] = ids;
        hosts.order = ids.to_vec();
        let evidence = hosts.evidence();

        let mut chat = fleet.conversation(&hosts, 1)?;
        fleet.answer(&mut chat, PROMPT)?;
        let first = hosts.audited(honest, 0)?;
        found.holds("the first turn is audited", "yes", first > 0);
        found.same("evidence of the first turn", 0, evidence.try_iter().count());
        second_turn.store(true, Ordering::SeqCst);
        let begin = Instant::now();
        fleet.answer(&mut chat, PROMPT + 7)?;
        hosts.audited(honest, first)?;
        found.same(
            "the second turn begins at",
            PROMPT,
            began.load(Ordering::SeqCst),
        );

        let evidence = evidence.recv_timeout(AUDIT_TIMEOUT);
        found.holds("the lie is disputed", "yes", evidence.is_ok());
        if let Ok(evidence) = evidence {
            let trial = Trial::about(NodeKey::from_secret(&secret), liar, honest, evidence)?;
            trial.convicts(&fleet, found)?;
            found.detected(begin.elapsed());
        }
        for (name, host) in [("audited", honest), ("third", other)] {
            let what = format!("the caller trusts the {name} host");
            found.holds(what, "yes", hosts.is_good(host));
        }
        Ok(())
    })
    .await
}
