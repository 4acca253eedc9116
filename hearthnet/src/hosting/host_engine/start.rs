//! Progress display and errors of a host's start.

use hearthnet_shard::{LoadPhase, Resource, StartError, StartProgress};

use crate::cli::{Failure, Kind, Progress, no_thread};
use crate::models::open_file::out_of_memory;

pub(crate) fn start_failure(listen: &str, error: &StartError) -> Failure {
    let (kind, hint) = match error {
        StartError::TooLittle {
            resource: Resource::Memory,
            ..
        } => return out_of_memory(error),
        StartError::Model(model) if model.is_out_of_memory() => return out_of_memory(error),
        StartError::TooLittle { .. } | StartError::Thread(_) => return no_thread(error),
        StartError::Listen(error) => (
            Kind::of_bind(error),
            format!("is another program using {listen}? port 0 takes a free one"),
        ),
        StartError::WeightsMismatch { .. } => {
            (Kind::WeightsMismatch, "fetch the model again with `hearthnet model pull`".to_owned())
        }
        StartError::LayerRange { .. } => (
            Kind::BadRequest,
            "`hearthnet model inspect` tells how many layers the model has".to_owned(),
        ),
        StartError::KvBudget { needed, .. } => (Kind::Config, kv_hint(*needed, 1)),
        StartError::Setting { .. } => {
            (Kind::Config, "`hearthnet config show` lists every setting".to_owned())
        }
        StartError::Model(_) | StartError::Load { .. } => (
            Kind::Model,
            "`hearthnet model inspect` shows what a file holds; `hearthnet model pull` fetches a fresh one"
                .to_owned(),
        ),
        _ => (Kind::Internal, "try again".to_owned()),
    };
    Failure::new(kind, error.to_string()).hint(hint)
}

/// Remedy for a KV budget of which one of `models` models needs `needed` bytes for a page.
pub(crate) fn kv_hint(needed: u64, models: usize) -> String {
    let all = needed.saturating_mul(models.max(1) as u64);
    let shared = match models {
        0 | 1 => String::new(),
        _ => format!("; {models} models share it equally"),
    };
    format!(
        "set research.distributed_inference.host.kv_budget_mb to {} at the very least, and to {} for \
         conversations of 2,000 tokens{shared}",
        all.div_ceil(1 << 20),
        (all / 32).saturating_mul(2000).div_ceil(1 << 20),
    )
}

/// Progress display of a host's start: a bar for each phase.
pub(crate) fn start_progress() -> impl FnMut(StartProgress) + Send + 'static {
    let mut bar = None;
    let mut phase = "";
    move |step| {
        let what = match step.phase {
            LoadPhase::Hashing => "hashing the model",
            LoadPhase::Verifying => "checking the layers",
            LoadPhase::Loading => "loading the layers",
            _ => return,
        };
        if phase != what {
            (bar, phase) = (Some(Progress::new(what)), what);
        }
        if let Some(bar) = &bar {
            bar.set(step.done, step.total);
        }
    }
}
