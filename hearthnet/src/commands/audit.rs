//! `hearthnet audit`: lists disputes about rows of hosts, and judges them (`specs/disputes.md`).

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Case, Community, Finding};
use serde_json::{Value, json};

use crate::answering::judge::{settle, text_of};
use crate::cli::args::{AuditCommand, CheckArgs};
use crate::cli::{Failure, block_on, failure, first_digits, note, print_result, table, when};
use crate::config::Context;
use crate::home::evidence::EvidenceFolder;
use crate::home::rights::is_anchor;
use crate::home::{Home, now_ms};
use crate::node::{
    Came, Change, EvidenceFetch, log_writer, open_home, sync_or_note, to_judge, with_synced_node,
};

pub(crate) fn run(command: AuditCommand, cx: &Context) -> Result<(), Failure> {
    let home = open_home(cx)?;
    match command {
        AuditCommand::List { json } => {
            block_on(async {
                sync_or_note(&home, &cx.config).await;
                Ok(())
            })?;
            home.log.update()?;
            list(&home.state(), json)
        }
        AuditCommand::Check(args) => check(&home, &args, cx),
        AuditCommand::Withdraw { dispute } => {
            let (id, _) = named(&home.state(), &dispute)?;
            judge(&home, id, Finding::Withdrawn)
        }
    }
}

fn judge(home: &Home, dispute: [u8; 32], finding: Finding) -> Result<(), Failure> {
    log_writer::write(home, false, Change::Judge { dispute, finding })
}

/// The dispute whose id begins with these digits.
fn named(state: &Community, text: &str) -> Result<([u8; 32], Case), Failure> {
    let begins = |id: &[u8; 32]| text.len() >= 4 && hex::encode(id).starts_with(text);
    let mut found = state.disputes().filter(|(id, _)| begins(id));
    match (found.next(), found.next()) {
        (Some((id, case)), None) => Ok((*id, case.clone())),
        (None, _) => Err(failure!(Community, "there is no dispute {text:?} in this log")
            .code("no_dispute")
            .hint("`hearthnet audit list` shows the disputes; name one by at least 4 digits of its id")),
        (Some(_), Some(_)) => Err(failure!(BadRequest, "{text:?} begins the ids of several disputes")
            .hint("name more digits, as `hearthnet audit list --json` shows them")),
    }
}

fn outcome_text(state: &Community, case: &Case) -> &'static str {
    state.outcome(case).map_or("open", Into::into)
}

fn list(state: &Community, as_json: bool) -> Result<(), Failure> {
    let now = now_ms();
    let name = |node: &NodeId| state.label(node, now);
    let shown: Vec<Value> = state
        .disputes()
        .map(|(id, case)| shown(state, id, case))
        .collect();
    let members = state.members().map(|(node, _)| *node);
    let reputations = members.map(|node| (node, state.reputation(&node)));
    let reputations: Vec<_> = reputations
        .filter(|(_, it)| it.is_convicted() || it.is_false_accuser())
        .collect();
    let nodes: Vec<Value> = reputations
        .iter()
        .map(|(node, it)| json!({"node": node, "guilty": it.guilty, "falsely_accused": it.falsely_accused}))
        .collect();
    let all = json!({"disputes": shown, "reputations": nodes});
    print_result(as_json, &all, || {
        if shown.is_empty() {
            return "no disputes\n".to_owned();
        }
        let rows = state.disputes().map(|(id, case)| {
            let dispute = &case.dispute;
            let (lo, hi) = dispute.layers;
            [
                first_digits(id),
                when(case.time_ms),
                name(&case.accuser),
                name(&dispute.accused),
                dispute
                    .witness
                    .map_or_else(|| "-".to_owned(), |host| name(&host)),
                format!("{lo}-{hi}"),
                outcome_text(state, case).to_owned(),
            ]
        });
        let mut text = table("dispute|since|accuser|accused|witness|layers|outcome", rows);
        for (node, it) in &reputations {
            let (name, guilty) = (name(node), it.guilty);
            if it.is_convicted() {
                text += &format!(
                    "{name} signed wrong rows ({guilty} verdicts): no route uses it; an anchor may revoke it\n"
                );
            }
            if it.is_false_accuser() {
                text += &format!("{name} accused falsely: its further disputes do not count\n");
            }
        }
        text
    })
}

fn shown(state: &Community, id: &[u8; 32], case: &Case) -> Value {
    let verdicts = case.verdicts.iter();
    let verdicts = verdicts.map(|(judge, finding)| json!({"judge": judge, "finding": finding}));
    json!({
        "id": hex::encode(id),
        "time_ms": case.time_ms,
        "accuser": case.accuser,
        "dispute": case.dispute,
        "verdicts": verdicts.collect::<Vec<_>>(),
        "outcome": outcome_text(state, case),
    })
}

fn check(home: &Home, args: &CheckArgs, cx: &Context) -> Result<(), Failure> {
    let own = home.key.id();
    if !is_anchor(home) {
        return Err(failure!(Community, "this node may not judge disputes: that takes an anchor's rights")
            .code("unauthorized")
            .hint("ask an anchor to run `hearthnet audit check`; `hearthnet community members` shows them"));
    }
    block_on(fetch_all(home, cx))?;
    home.log.update()?;
    let state = home.state();
    let asked = match &args.dispute {
        Some(text) => vec![named(&state, text)?],
        None => {
            let mine = to_judge(&state, &own);
            let mine = mine.filter(|(_, case)| !case.verdicts.contains_key(&own));
            mine.map(|(id, case)| (*id, case.clone())).collect()
        }
    };
    if asked.is_empty() {
        note("no open dispute waits for a verdict of this node");
    }
    let (mut settled, mut failed) = (Vec::new(), None);
    for (id, case) in asked {
        match settle(home, &case, args.model.as_ref(), None, cx) {
            Ok(finding) => {
                judge(home, id, finding)?;
                settled.push((id, finding));
            }
            // The others may be settled.
            Err(why) => {
                note(format!("{}: {}", first_digits(&id), why.with_hint()));
                failed = Some(why);
            }
        }
    }
    let told = settled.iter();
    let told = told.map(|(id, finding)| json!({"id": hex::encode(id), "finding": finding}));
    let told = json!({"verdicts": told.collect::<Vec<_>>()});
    print_result(args.json, &told, || {
        let lines = settled.iter();
        let line = |(id, finding): &_| format!("{}  {}\n", first_digits(id), text_of(*finding));
        lines.map(line).collect()
    })?;
    failed.map_or(Ok(()), Err)
}

/// Fetches the evidence that this node may judge, unless its daemon does.
async fn fetch_all(home: &Home, cx: &Context) -> Result<(), Failure> {
    let folder = EvidenceFolder::of(&home.dir);
    with_synced_node(home, &cx.config, async |node| {
        let Some(node) = node else {
            return Ok(());
        };
        let state = home.state();
        for (_, case) in to_judge(&state, &node.id()) {
            if folder.has(&case.dispute.evidence) {
                continue;
            }
            let mut fetch = EvidenceFetch::new(folder.clone());
            loop {
                let came = fetch.turn(node, &state, case).await;
                if came.map_err(|e| folder.failure("write", e))? != Came::More {
                    break;
                }
            }
        }
        Ok(())
    })
    .await
}
