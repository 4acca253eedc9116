//! Plans of the models that answer here, in words. They are computed only while the page asks, on a
//! blocking thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::NodeId;
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::service::ServedModel;
use parking_lot::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::cli::args::PlanFor;
use crate::home::{Home, now_ms};
use crate::planning::{Asked, Report, Words, shape};

/// Shortest time between two computations.
const EVERY: Duration = Duration::from_secs(5);
/// Age from which on plans are no longer shown.
const OLD: Duration = Duration::from_secs(60);

/// Latest plans.
#[derive(Default)]
pub(super) struct Plans(Mutex<Latest>);

#[derive(Default)]
struct Latest {
    /// Start of the latest computation.
    begun: Option<Instant>,
    computing: Option<JoinHandle<()>>,
    words: BTreeMap<WeightsId, Words>,
}

impl Plans {
    /// Plans as last computed; none at first. Begins the next computation if it is due, of which members
    /// that are not `connected` are left out.
    pub(super) fn look(
        self: &Arc<Self>,
        service: &Service,
        home: &Home,
        connected: BTreeSet<NodeId>,
    ) -> BTreeMap<WeightsId, Words> {
        let mut latest = self.0.lock();
        let age = latest.begun.map(|begun| begun.elapsed());
        let is_running = latest
            .computing
            .as_ref()
            .is_some_and(|task| !task.is_finished());
        if is_running || age.is_some_and(|age| age < EVERY) {
            return latest.words.clone();
        }
        if age.is_some_and(|age| age >= OLD) {
            latest.words.clear();
        }
        let (plans, home, models) = (Arc::clone(self), home.clone(), service.models());
        latest.begun = Some(Instant::now());
        latest.computing = Some(spawn_blocking(move || {
            let words = plan_all(&home, &models, &connected);
            plans.0.lock().words = words;
        }));
        latest.words.clone()
    }
}

fn plan_all(
    home: &Home,
    models: &[Arc<ServedModel>],
    connected: &BTreeSet<NodeId>,
) -> BTreeMap<WeightsId, Words> {
    let (state, now) = (home.state(), now_ms());
    let name = |node: &NodeId| state.shown_name(node, now);
    let measured = state.measured(now).map(|(node, _)| *node);
    let away = measured.filter(|node| *node != home.key.id() && !connected.contains(node));
    let unreachable: BTreeSet<NodeId> = away.collect();
    let plan = |model: &Arc<ServedModel>| {
        let shape = shape(&model.file, model.hosted.clone());
        let asked = Asked {
            model_id: &model.id,
            weights: model.weights,
            shape: &shape,
            is_here: model.file.is_whole(),
            own: home.key.id(),
            purpose: PlanFor::Chat,
            unreachable: &unreachable,
        };
        let plan = Report::of(&state, &asked, now, &name);
        let left_out = asked.left_out(&state, now, &name);
        (model.weights, Words::of(&plan, &left_out, &name))
    };
    models.iter().map(plan).collect()
}
