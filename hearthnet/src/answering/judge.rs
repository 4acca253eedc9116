//! Judgement of a dispute: its evidence is checked, and its rows are computed here
//! (`specs/disputes.md` 6).

use std::sync::Arc;

use hearthnet_bus::evidence::{Evidence, EvidenceFault};
use hearthnet_bus::log::{Case, Finding};
use hearthnet_bus::sealed::{self, OpenError, hash_of};
use hearthnet_engine::{ARITHMETIC, EngineOptions};
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{BoundaryDtype, WeightsId};
use hearthnet_hub::ModelRef;

use super::chat_backends::recompute_here;
use crate::cli::{Failure, failure, note};
use crate::config::Context;
use crate::home::Home;
use crate::home::evidence::EvidenceFolder;
use crate::models::{OpenModel, here_with, open_model};
use crate::node::may_judge;

/// Finds out who signed wrong rows. The layers are those of the model `named`, or of any model here
/// with the weights of the dispute. Without `threads`, their number is that of the configuration.
///
/// # Errors
/// If this node may not judge, or lacks the evidence or the layers.
pub(crate) fn settle(
    home: &Home,
    case: &Case,
    named: Option<&ModelRef>,
    threads: Option<usize>,
    cx: &Context,
) -> Result<Finding, Failure> {
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
    let model = model_for(home, case, named, cx)?;
    let options = cx.config.engine_options(threads);
    let Some((computed, row_bytes)) = compute(model, &evidence, dispute.layers, options)? else {
        note("the rows of the evidence are not of this model's width");
        return Ok(Finding::None);
    };
    Ok(evidence.finding(&computed, row_bytes))
}

/// A finding as a sentence.
pub(crate) fn text_of(finding: Finding) -> &'static str {
    match finding {
        Finding::Accused => "the accused host signed wrong rows",
        Finding::Witness => "the witness signed wrong rows; the accused host is cleared",
        Finding::Both => "both hosts signed wrong rows",
        Finding::None => "the evidence shows no wrong rows: the accusation is false",
        Finding::Withdrawn => "the verdict is withdrawn",
    }
}

/// Opens a model with the weights and the layers of a dispute.
fn model_for(
    home: &Home,
    case: &Case,
    named: Option<&ModelRef>,
    cx: &Context,
) -> Result<OpenModel, Failure> {
    let wanted = WeightsId(case.dispute.weights);
    let (lo, hi) = case.dispute.layers;
    let lacks = |what: String| {
        failure!(Model, "this machine cannot compute layers {lo}-{hi} of the weights {wanted}: {what}")
            .hint("`hearthnet audit check --model FILE` names a file with these weights; `hearthnet model pull` fetches one")
    };
    let named: ModelRef = match named {
        Some(named) => named.clone(),
        None => here_with(cx, home, wanted)?.ok_or_else(|| lacks("no file has them".to_owned()))?,
    };
    // The number format of the rows is that of the evidence, whatever is configured here.
    let mut cx = cx.clone();
    cx.config.research.distributed_inference.activation_dtype = "fp16".to_owned();
    let mut model = open_model(&cx, Some(&named), Some(home))?;
    if model.weights != wanted {
        // So is that of keys and values.
        cx.config.research.distributed_inference.cache_dtype = CacheDtype::F16;
        model = open_model(&cx, Some(&named), Some(home))?;
    }
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

/// Rows that the layers return for the rows of the evidence, and the bytes of one; `None` if those
/// of the evidence have another width.
fn compute(
    mut model: OpenModel,
    evidence: &Evidence,
    (lo, hi): (u32, u32),
    options: EngineOptions,
) -> Result<Option<(Vec<u8>, usize)>, Failure> {
    let (spec, row) = (model.file.spec(), evidence.row_bytes as usize);
    let (width, values) = (spec.width as usize, spec.row_values(&(lo..hi + 1)));
    let boundary = [spec.boundary, BoundaryDtype::F32]
        .into_iter()
        .find(|boundary| values.checked_mul(boundary.bytes_per_value()) == Some(row));
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
    let compute = recompute_here(&model, options);
    let computed = compute(lo..hi + 1, &values)?;
    let mut rows = Vec::new();
    boundary.encode(&computed, &mut rows);
    Ok(Some((rows, width * boundary.bytes_per_value())))
}
