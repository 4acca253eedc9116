//! `hearthnet audit`: lists disputes about rows of hosts, and judges them (`specs/disputes.md`).

use std::sync::Arc;

use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::{Evidence, EvidenceFault};
use hearthnet_bus::log::{Case, Community, Finding, Level};
use hearthnet_bus::sealed::{self, OpenError, hash_of};
use hearthnet_engine::ARITHMETIC;
use hearthnet_files::{BoundaryDtype, WeightsId};
use hearthnet_hub::ModelRef;
use serde_json::{Value, json};

use crate::answering::chat_backends::recompute_here;
use crate::cli::args::{AuditCommand, CheckArgs};
use crate::cli::{Failure, block_on, failure, first_digits, note, print_result, table, when};
use crate::config::Context;
use crate::home::evidence::EvidenceFolder;
use crate::home::{Home, now_ms};
use crate::models::{OpenModel, here_with, open_model};
use crate::node::{
    Change, fetch_evidence, log_writer, may_judge, open_home, sync_or_note, to_judge,
    with_synced_node,
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
    if home.state().level(&own) != Some(Level::Anchor) {
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
        match settle(home, &case, args, cx) {
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

fn text_of(finding: Finding) -> &'static str {
    match finding {
        Finding::Accused => "the accused host signed wrong rows",
        Finding::Witness => "the witness signed wrong rows; the accused host is cleared",
        Finding::Both => "both hosts signed wrong rows",
        Finding::None => "the evidence shows no wrong rows: the accusation is false",
        Finding::Withdrawn => "the verdict is withdrawn",
    }
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
            if let Some(sealed) = fetch_evidence(node, &state, case).await {
                let put = folder.put(&sealed);
                put.map_err(|e| folder.failure("write", e))?;
            }
        }
        Ok(())
    })
    .await
}

/// Checks the evidence of a dispute and computes its rows.
fn settle(home: &Home, case: &Case, args: &CheckArgs, cx: &Context) -> Result<Finding, Failure> {
    if !may_judge(&home.state(), &home.key.id(), case) {
        return Err(failure!(
            Community,
            "this node is a party of the dispute, and cannot judge it"
        )
        .code("unauthorized")
        .hint("another anchor has to; the root key can make one (`hearthnet community promote`)"));
    }
    let dispute = &case.dispute;
    let folder = EvidenceFolder::of(&home.dir);
    let sealed = folder.read(&dispute.evidence);
    let sealed = sealed.map_err(|e| folder.failure("read", e))?;
    let sealed = sealed.filter(|sealed| {
        sealed.len() as u64 == dispute.evidence_bytes && hash_of(sealed) == dispute.evidence
    });
    let sealed = sealed.ok_or_else(|| {
        failure!(Community, "the evidence is not here, and no member that could have it serves it")
            .code("no_evidence")
            .hint("is the accuser's node running? It serves the evidence; a running node of this home fetches it within a minute")
    })?;
    let evidence = match sealed::open(&sealed, &home.key) {
        Ok(content) => Evidence::decode(&content),
        Err(OpenError::OtherReaders) => {
            return Err(failure!(Community, "{}", OpenError::OtherReaders)
                .code("no_evidence")
                .hint("only nodes that were anchors when the dispute began can judge it"));
        }
        Err(_) => Err(EvidenceFault::Malformed),
    };
    let checked = evidence.and_then(|evidence| {
        evidence.check(&case.accuser, dispute, ARITHMETIC)?;
        Ok(evidence)
    });
    let evidence = match checked {
        Ok(evidence) => evidence,
        Err(fault) => {
            note(fault.to_string());
            return Ok(Finding::None);
        }
    };
    let model = model_for(home, case, args, cx)?;
    let Some(computed) = compute(model, &evidence, dispute.layers, cx)? else {
        note("the rows of the evidence are not of this model's width");
        return Ok(Finding::None);
    };
    Ok(evidence.finding(&computed))
}

/// Opens a model with the weights and the layers of a dispute.
fn model_for(
    home: &Home,
    case: &Case,
    args: &CheckArgs,
    cx: &Context,
) -> Result<OpenModel, Failure> {
    let wanted = WeightsId(case.dispute.weights);
    let (lo, hi) = case.dispute.layers;
    let lacks = |what: String| {
        failure!(Model, "this machine cannot compute layers {lo}-{hi} of the weights {wanted}: {what}")
            .hint("`hearthnet audit check --model FILE` names a file with these weights; `hearthnet model pull` fetches one")
    };
    let named: ModelRef = match &args.model {
        Some(named) => named.clone(),
        None => here_with(cx, home, wanted)?.ok_or_else(|| lacks("no file has them".to_owned()))?,
    };
    // The number format of the rows is that of the evidence, whatever is configured here.
    let mut cx = cx.clone();
    cx.config.research.distributed_inference.activation_dtype = "fp16".to_owned();
    let model = open_model(&cx, Some(&named), Some(home))?;
    if model.weights != wanted {
        return Err(lacks(format!(
            "{} has the weights {}",
            model.id, model.weights
        )));
    }
    if hi >= model.file.spec().layers || !model.file.holds_layers(lo, hi) {
        return Err(lacks(format!("the part of {} here lacks layers", model.id)));
    }
    Ok(model)
}

/// Rows that the layers return for the rows of the evidence; `None` if these have another width.
fn compute(
    mut model: OpenModel,
    evidence: &Evidence,
    (lo, hi): (u32, u32),
    cx: &Context,
) -> Result<Option<Vec<u8>>, Failure> {
    let (width, row) = (
        model.file.spec().width as usize,
        evidence.row_bytes as usize,
    );
    let boundary = [model.file.spec().boundary, BoundaryDtype::F32]
        .into_iter()
        .find(|boundary| width.checked_mul(boundary.bytes_per_value()) == Some(row));
    let Some(boundary) = boundary else {
        return Ok(None);
    };
    if boundary != model.file.spec().boundary {
        let file = Arc::into_inner(model.file);
        let file = file.ok_or_else(|| Failure::internal("the model is open twice"))?;
        model.file = Arc::new(file.with_boundary(boundary));
    }
    let mut values = Vec::new();
    if boundary.decode(&evidence.rows, &mut values).is_err() {
        return Ok(None);
    }
    let compute = recompute_here(&model, cx.config.engine_options(None));
    let computed = compute(lo..hi + 1, &values)?;
    let mut rows = Vec::new();
    boundary.encode(&computed, &mut rows);
    Ok(Some(rows))
}
