//! A caller slanders an honest host: with a receipt of it and altered rows, with its true receipt, and
//! with the help of a crowd and of hosts that judge. The host is never convicted, and the caller is
//! known as a false accuser on all nodes.

use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::{Dispute, Finding, MAX_OPEN_DISPUTES};

use super::a_steering_host_is_convicted_by_a_third_node::{Trial, audited_fleet};
use super::prelude::*;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, |runtime, found| {
        // The caller's accomplice lies, so that the caller gets signed claims of both hosts.
        let fleet = audited_fleet(runtime)?;
        let lie = |passing: hearthnet_testkit::Passing<'_>| {
            passing.rows.iter_mut().for_each(|value| *value += 0.01);
        };
        let trial = || Trial::of(&fleet, fleet.shared_file(), Box::new(lie));
        for (what, alters) in [("altered rows", true), ("a true receipt", false)] {
            let trial = trial()?;
            let mut slander = claims_of(&trial.evidence, &trial.honest)?;
            if alters {
                slander.rows.iter_mut().for_each(|byte| *byte ^= 1);
            }
            let finding = trial.settle(&fleet, &trial.caller, &slander)?;
            found.same(format!("{what}: the finding"), Finding::None, finding);
            let honest = trial.reputation(&trial.honest);
            found.same(format!("{what}: guilty verdicts"), 0, honest.guilty);
            let own = trial.reputation(&trial.caller.id()).is_false_accuser();
            found.holds(format!("{what}: counts against the accuser"), "yes", own);
            let again = trial.write(&trial.caller, accusation(1, trial.honest));
            found.holds(
                format!("{what}: a further dispute"),
                "refused",
                again.is_err(),
            );
        }
        let trial = trial()?;
        crowd(&trial, found)
    })
    .await
}

/// Evidence that holds only this host's claims.
fn claims_of(evidence: &Evidence, host: &NodeId) -> Result<Evidence> {
    let both = [Some(&evidence.accused), evidence.witness.as_ref()];
    let own = both.into_iter().flatten();
    let mut own = own.filter(|proof| proof.statement.host == *host).cloned();
    let own = own.next_back();
    let own = own.ok_or_else(|| HarnessError::attacker("the host has signed nothing"))?;
    let slander = Evidence::new(evidence.row_bytes, evidence.rows.clone(), own, None);
    slander.ok_or_else(|| HarnessError::attacker("the rows are too few"))
}

fn dispute(n: u8, accused: NodeId) -> Dispute {
    Dispute {
        evidence: [n; 32],
        ..hearthnet_bus::testing::dispute(accused)
    }
}

fn accusation(n: u8, accused: NodeId) -> Body {
    Body::Disputed(dispute(n, accused))
}

/// Members that one member let in accuse the host, and trusted members judge.
fn crowd(trial: &Trial, found: &mut Findings) -> Result<()> {
    let policy = hearthnet_bus::log::Policy {
        who_may_invite: Level::Member,
        research: true,
    };
    trial.home.append(Body::PolicyChanged(policy));
    let code = new_key()?;
    trial.write(
        &trial.caller,
        Body::Invited {
            invite: code.id(),
            level: Level::Member,
            uses: 30,
            expires_ms: hearthnet_bus::now_ms() + 3_600_000,
        },
    )?;
    let community = trial.home.log.community();
    let expires = hearthnet_bus::now_ms() / 1000 + 3600;
    let invite = Invite::new(community, *code.secret(), expires, Vec::new())?;
    let accomplice = new_key()?;
    trial.home.admit(accomplice.id(), Level::Trusted);
    let mut accepted = 0;
    for n in 0..20 {
        let member = new_key()?;
        trial.home.append(Body::Admitted {
            request: invite.request(member.id(), "crowd")?,
            level: Level::Member,
        });
        if trial.write(&member, accusation(n, trial.honest)).is_ok() {
            accepted += 1;
            let verdict = Body::Judged {
                dispute: dispute(n, trial.honest).id(&member.id()),
                finding: Finding::Accused,
            };
            for judge in [&accomplice, &trial.caller, &member] {
                let judged = trial.write(judge, verdict.clone());
                found.holds(
                    "a verdict of a node that is no anchor",
                    "refused",
                    judged.is_err(),
                );
            }
        }
    }
    found.same("open disputes of the crowd", MAX_OPEN_DISPUTES, accepted);
    let honest = trial.reputation(&trial.honest);
    found.same("a crowd: guilty verdicts", 0, honest.guilty);
    Ok(())
}
