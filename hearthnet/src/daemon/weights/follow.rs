//! Follows what the community adopts and drops: opens chats with each adopted model, and serves
//! layers of each.
//!
//! The models that can be used here share the memory of this node equally. When another number of them
//! has held for a while (`shares.rs`), served layers that fit into the new share stay, and a host with
//! more gives up some. Until it has, no further model is served.
//!
//! A failed attempt is repeated after a pause (`retry.rs`), and at once when the community's models
//! change. New sources of a model are asked at once; another file of it is opened like a new model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{FutureExt, select_all};
use hearthnet_bus::log::Adoption;
use hearthnet_files::part::Part;
use hearthnet_hub::parts::LocalSource;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::service::ServedModel;
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

use super::dropped::{Drops, end_use};
use super::fetcher::local_source;
use super::retry::{Retry, until};
use super::shares::Shares;
use super::{Fetcher, Parts};
use crate::answering::chat_setup::most_chats;
use crate::answering::private_layers;
use crate::cli::args::PrivateArgs;
use crate::cli::{Failure, Stop, blocking, failure, note};
use crate::config::Context;
use crate::daemon::chats::shared_model;
use crate::daemon::layer_events::EventSink;
use crate::daemon::layer_host::{ANSWERED, LayerHost};
use crate::daemon::layer_request::LayerRequest;
use crate::home::Home;
use crate::hosting::host_engine::HostEngine;
use crate::models::{OpenModel, disk_limit, open_part};
use crate::node::DaemonNode;

/// Time for ended engines to return their memory to the system, before it is divided anew.
const RETURNED: Duration = Duration::from_millis(500);

/// Longest wait for answers.
const LONGEST_ANSWER: Duration = Duration::from_secs(60);
/// Interval of looking for steps, at most that of a host.
const STEP_INTERVAL: Duration = Duration::from_millis(250);

/// Everything that following needs.
pub(in crate::daemon) struct Follower {
    pub(in crate::daemon) cx: Context,
    pub(in crate::daemon) home: Home,
    pub(in crate::daemon) node: Arc<DaemonNode>,
    pub(in crate::daemon) layer_host: Arc<LayerHost>,
    pub(in crate::daemon) service: Service,
    pub(in crate::daemon) parts: Arc<Parts>,
    pub(in crate::daemon) private: PrivateArgs,
    /// Path of `--from`, where pieces are looked for first.
    pub(in crate::daemon) from: Option<PathBuf>,
    /// Engine of the layers that this node serves; `None` if it serves none.
    pub(in crate::daemon) engine: Option<HostEngine>,
    pub(in crate::daemon) tell: EventSink,
    /// Whether this node can hold layers, for its measurements.
    pub(in crate::daemon) is_ready: watch::Sender<bool>,
}

/// An adopted model.
struct Followed {
    model: Arc<Adoption>,
    /// Its sources, for the fetches that run.
    addresses: watch::Sender<Vec<String>>,
    /// Path of `--from`, for all attempts: a whole file is hashed once.
    from: Option<Arc<LocalSource>>,
    /// Task of the attempt to open it, while that runs.
    opening: Option<AbortHandle>,
    retry: Retry,
    /// Time of the first attempt; `None`: at once.
    opens_at: Option<Instant>,
    /// Attempts to serve its layers.
    hosting: Retry,
}

/// An adopted model that can be used here.
struct Usable {
    model: OpenModel,
    fetcher: Fetcher,
    part: Arc<Part>,
}

/// Layers of a model that are being served.
struct Hosted {
    task: JoinHandle<Result<(), Failure>>,
    /// Stops the layers when dropped.
    stops: DropGuard,
}

/// Adopted models, and what is done with them.
#[derive(Default)]
struct Models {
    followed: BTreeMap<[u8; 32], Followed>,
    usable: BTreeMap<[u8; 32], Usable>,
    opening: JoinSet<Opened>,
    hosted: BTreeMap<[u8; 32], Hosted>,
    shares: Shares,
    drops: Drops,
}

/// End of an attempt to open a model.
type Opened = Result<(Usable, ServedModel), Failure>;

impl Follower {
    /// Follows the log until a stop.
    pub(in crate::daemon) async fn run(self, stop: Stop) -> Result<(), Failure> {
        let mut changes = self.home.log.changes();
        let mut models = Models::default();
        loop {
            self.take_adoptions(&mut models).await;
            // All comparisons use the same time, so that no attempt becomes due between two looks.
            let moment = Instant::now();
            self.begin_to_open(&mut models, moment);
            self.is_ready.send_if_modified(|is_ready| {
                let now = models.are_ready(*is_ready);
                std::mem::replace(is_ready, now) != now
            });
            self.divide_memory(&mut models, moment, &stop).await;
            let is_shrinking = self.layer_host.is_shrinking();
            if models.usable.len() <= models.shares.models() && !is_shrinking {
                self.begin_to_serve(&mut models, moment, &stop);
            }
            let next = models.next_attempt(moment);
            tokio::select! {
                () = stop.asked() => break,
                _ = changes.changed() => {}
                () = self.layer_host.until_shrunk(), if is_shrinking => {}
                Some(ended) = models.opening.join_next_with_id() => {
                    let (task, opened) = match ended {
                        Ok(ended) => ended,
                        Err(error) => (error.id(), Err(Failure::internal(error))),
                    };
                    self.opened(&mut models, task, opened);
                }
                (weights, ended) = ended(&mut models.hosted) => {
                    models.hosted.remove(&weights);
                    self.parts.end_serving(&weights);
                    if let (Err(why), Some(it)) = (ended, models.followed.get_mut(&weights)) {
                        let what = format!("no layers of {} are served", it.model.name);
                        again(&mut it.hosting, &what, &why);
                    }
                }
                () = until(next) => {}
            }
        }
        for hosted in models.hosted.into_values() {
            let _ = hosted.task.await;
        }
        Ok(())
    }

    /// Ends the use of models that were dropped or replaced, and follows new ones. After a change, all
    /// failed attempts are repeated at once.
    async fn take_adoptions(&self, models: &mut Models) {
        let state = self.home.state();
        let now: BTreeMap<[u8; 32], Adoption> = state
            .models()
            .into_iter()
            .map(|model| (model.weights, model.clone()))
            .collect();
        let stays = |weights: &[u8; 32], it: &Followed| {
            let adopted = now.get(weights);
            adopted.is_some_and(|adopted| same_file(adopted, &it.model))
        };
        let gone: Vec<_> = models
            .followed
            .extract_if(.., |weights, it| !stays(weights, it))
            .collect();
        let mut has_changed = !gone.is_empty();
        let served = models.hosted.len();
        for (weights, it) in gone {
            end_layers(&self.parts, models.hosted.remove_entry(&weights)).await;
            if let Some(opening) = it.opening {
                opening.abort();
            }
            if it.opens_at.is_none_or(|at| at <= Instant::now()) {
                models.drops.add(Instant::now(), weights);
            }
            let is_dropped = !now.contains_key(&weights);
            let part = self.end_model(&it.model, models.usable.remove(&weights), is_dropped);
            if is_dropped {
                end_use(&self.home, &it.model, part).await;
            }
        }
        if models.hosted.len() < served {
            tokio::time::sleep(RETURNED).await;
        }
        for (weights, model) in now {
            has_changed |= match models.followed.get(&weights) {
                Some(it) => it.take_sources(&model.sources),
                None => {
                    let opens_at = models.drops.opens_at(Instant::now(), &weights);
                    let from = local_source(self.from.as_deref(), &model);
                    let new = Followed {
                        from,
                        ..Followed::new(model, opens_at)
                    };
                    models.followed.insert(weights, new);
                    true
                }
            };
        }
        if has_changed {
            for it in models.followed.values_mut() {
                it.retry.hurry();
                it.hosting.hurry();
            }
        }
    }

    /// Begins the attempts to open models that are due.
    fn begin_to_open(&self, models: &mut Models, moment: Instant) {
        for (weights, it) in &mut models.followed {
            let waits = it.opening.is_some() || models.usable.contains_key(weights);
            let is_early = it.opens_at.is_some_and(|at| at > moment);
            if waits || is_early || !it.retry.is_due(moment) {
                continue;
            }
            let node = (self.home.clone(), Arc::clone(&self.node));
            let open = Self::open(self.fetcher(it), node, self.cx.clone(), self.private);
            it.opening = Some(models.opening.spawn(open));
        }
    }

    /// Adds an opened model to the chats, or plans another attempt.
    fn opened(&self, models: &mut Models, task: Id, opened: Opened) {
        let is_its = |it: &&mut Followed| {
            let opening = it.opening.as_ref();
            opening.is_some_and(|opening| opening.id() == task)
        };
        // Its model may have been dropped meanwhile.
        let Some(it) = models.followed.values_mut().find(is_its) else {
            return;
        };
        it.opening = None;
        let added = opened.and_then(|(opened, chats)| {
            self.check_name(&opened.model)?;
            self.service.add_model(chats);
            Ok(opened)
        });
        match added {
            Ok(opened) => {
                it.retry = Retry::default();
                models.usable.insert(it.model.weights, opened);
            }
            Err(why) => {
                self.parts.end_use(&it.model.weights);
                let what = format!("the adopted model {} cannot be used", it.model.name);
                again(&mut it.retry, &what, &why);
            }
        }
    }

    /// Divides the memory anew if another number of models can be used. A model that cannot be used
    /// takes no share.
    async fn divide_memory(&self, models: &mut Models, moment: Instant, stop: &Stop) {
        let mut followed = models.followed.values();
        let is_first = models.hosted.is_empty() && followed.all(|it| it.opening.is_none());
        let Some(before) = models.shares.look(moment, models.usable.len(), is_first) else {
            return;
        };
        let number = models.shares.models();
        for it in models.followed.values_mut() {
            it.hosting.hurry();
        }
        let mut kept = BTreeSet::new();
        for weights in models.hosted.keys() {
            if let Some(it) = models.usable.get(weights)
                && self.keeps(it, number, number < before).await
            {
                kept.insert(*weights);
            }
        }
        let ends = |weights: &[u8; 32], _: &mut Hosted| !kept.contains(weights);
        let ended: Vec<_> = models.hosted.extract_if(.., ends).collect();
        if !ended.is_empty() {
            until_answered(&self.layer_host, stop).await;
            end_layers(&self.parts, ended).await;
            tokio::time::sleep(RETURNED).await;
        }
    }

    /// Begins to serve layers of usable models, as far as attempts are due.
    fn begin_to_serve(&self, models: &mut Models, moment: Instant, stop: &Stop) {
        for (weights, model) in &models.usable {
            let it = models.followed.get(weights);
            let is_due = it.is_some_and(|it| it.hosting.is_due(moment));
            if is_due && !models.hosted.contains_key(weights) {
                let begun = self.host(model, models.shares.models(), stop);
                models.hosted.extend(begun.map(|begun| (*weights, begun)));
            }
        }
    }

    fn fetcher(&self, it: &Followed) -> Fetcher {
        Fetcher {
            home: self.home.clone(),
            node: self.node.node.clone(),
            daemon: Some(Arc::clone(&self.node)),
            parts: Arc::clone(&self.parts),
            disk_limit: disk_limit(&self.cx.config),
            model: Arc::clone(&it.model),
            addresses: it.addresses.subscribe(),
            from: it.from.clone(),
        }
    }

    /// Fetches and loads what chats with the model need here: the head, and the private layers.
    async fn open(
        fetcher: Fetcher,
        (home, node): (Home, Arc<DaemonNode>),
        cx: Context,
        args: PrivateArgs,
    ) -> Opened {
        let part = fetcher.part().await?;
        let opened = {
            let (cx, part, name) = (cx.clone(), Arc::clone(&part), fetcher.model.name.clone());
            blocking(move || open_part(&cx, &name, &part))
        };
        let model = opened.await?;
        let table = part.table();
        let mut wanted = table.of_head();
        for (lo, hi) in private_layers::wanted(&model, args, &cx.config)? {
            wanted.extend(table.of_layers(lo, hi));
        }
        fetcher.fetch_for_chats(&part, wanted.clone()).await?;
        let load = || {
            let (mut model, cx) = (model.clone(), cx.clone());
            let (home, node) = (home.clone(), Arc::clone(&node));
            blocking(move || {
                private_layers::load(&mut model, args, most_chats(&cx.config), &cx.config)?;
                let chats = shared_model(&node, &home, &model, &cx.config)?;
                Ok((model, chats))
            })
        };
        let mut loaded = load().await;
        // A damaged piece ends the load.
        if loaded.is_err() && fetcher.finds_damage(&part, &wanted).await? {
            fetcher.fetch_for_chats(&part, wanted).await?;
            loaded = load().await;
        }
        let (model, chats) = loaded?;
        let usable = Usable {
            model,
            fetcher,
            part,
        };
        Ok((usable, chats))
    }

    /// Request to serve layers of one of `models` models that share the memory; `None` if this node
    /// serves none.
    fn request(&self, chosen: &Usable, models: usize) -> Option<LayerRequest> {
        Some(LayerRequest {
            model: chosen.model.clone(),
            layers: self.cx.config.serve_layers(),
            threads: None,
            engine: self.engine.clone()?,
            fetch: Some((chosen.fetcher.clone(), Arc::clone(&chosen.part))),
            models,
        })
    }

    /// Gives served layers of a model their new share of memory and disk. Returns whether they stay, or
    /// at least some of them.
    async fn keeps(&self, served: &Usable, models: usize, are_fewer: bool) -> bool {
        let Some(request) = self.request(served, models) else {
            return false;
        };
        let fits_disk = are_fewer || served.fetcher.keeps_layers(&served.part, models).await;
        fits_disk && self.layer_host.keep(&request, are_fewer)
    }

    /// Begins to serve layers of one of `models` models that share the memory, if this node serves any.
    fn host(&self, chosen: &Usable, models: usize, stop: &Stop) -> Option<Hosted> {
        let request = self.request(chosen, models)?;
        let (stop, stops) = stop.or_dropped();
        let (host, tell) = (Arc::clone(&self.layer_host), Arc::clone(&self.tell));
        Some(Hosted {
            task: tokio::spawn(async move { host.serve(request, tell, stop).await }),
            stops,
        })
    }

    /// Refuses a model whose name another one has in the service. Two anchors may adopt models with
    /// one name at the same time.
    fn check_name(&self, model: &OpenModel) -> Result<(), Failure> {
        let other = self.service.model(&model.id);
        match other.is_some_and(|other| other.weights != model.weights) {
            false => Ok(()),
            true => Err(
                failure!(Model, "another adopted model has the name {}", model.id)
                    .code("name_taken")
                    .hint("an anchor drops one of them: `hearthnet model list` shows their weights ids, and `hearthnet model drop` takes the first digits of one"),
            ),
        }
    }

    /// Ends chats with a model that was dropped, or adopted with another file. Returns its part, if that
    /// is open.
    fn end_model(
        &self,
        model: &Adoption,
        usable: Option<Usable>,
        is_dropped: bool,
    ) -> Option<Arc<Part>> {
        let open = self.parts.remove(&model.weights);
        if let Some(usable) = usable {
            self.service.remove_model(&usable.model.id);
        }
        let name = &model.name;
        if is_dropped {
            note(format!("{name} was dropped by the community"));
        } else {
            note(format!(
                "another file of {name} was adopted by the community"
            ));
        }
        open
    }
}

impl Models {
    /// Whether a plan may count on this node: a model is open, and at the start of the daemon each was
    /// opened once, or could not be. True without adopted models. `before` is the last result.
    fn are_ready(&self, before: bool) -> bool {
        let is_open = !self.usable.is_empty() && (before || self.opening.is_empty());
        is_open || self.followed.is_empty()
    }

    /// Time of the next attempt after `moment`. One that is due has begun, or there is no model or no
    /// share for it.
    fn next_attempt(&self, moment: Instant) -> Option<Instant> {
        let (usable, hosted) = (&self.usable, &self.hosted);
        let idle = self
            .followed
            .iter()
            .filter(|(weights, it)| it.opening.is_none() && !usable.contains_key(*weights));
        let idle = idle.filter_map(|(_, it)| it.retry.at().max(it.opens_at));
        let layers = self
            .followed
            .iter()
            .filter(|(weights, _)| !hosted.contains_key(*weights))
            .filter_map(|(_, it)| it.hosting.at());
        let all = idle.chain(layers).chain(self.shares.at());
        all.filter(|at| *at > moment).min()
    }
}

impl Followed {
    fn new(model: Adoption, opens_at: Option<Instant>) -> Self {
        if let Some(at) = opens_at {
            let minutes = at.saturating_duration_since(Instant::now()).as_secs() / 60 + 1;
            note(format!(
                "{} was dropped and adopted several times within an hour; it is fetched again in {minutes} \
                 min",
                model.name
            ));
        }
        Self {
            addresses: watch::Sender::new(model.sources.clone()),
            from: None,
            model: Arc::new(model),
            opening: None,
            retry: Retry::default(),
            opens_at,
            hosting: Retry::default(),
        }
    }

    /// Lets fetches ask these sources. Returns whether they differ from those before.
    fn take_sources(&self, sources: &[String]) -> bool {
        self.addresses.send_if_modified(|known| {
            let differs = known.as_slice() != sources;
            if differs {
                *known = sources.to_vec();
            }
            differs
        })
    }
}

/// Whether two adoptions differ in nothing but their sources.
fn same_file(one: &Adoption, other: &Adoption) -> bool {
    let without = |model: &Adoption| Adoption {
        sources: Vec::new(),
        ..model.clone()
    };
    without(one) == without(other)
}

/// Records a failure, and reports it if its reason is new.
fn again(retry: &mut Retry, what: &str, why: &Failure) {
    if let Some(pause) = retry.failed(Instant::now(), why.to_string()) {
        let (why, seconds) = (why.with_hint(), pause.as_secs());
        note(format!("{what}: {why}; trying again in {seconds} s"));
    }
}

/// Waits until answers have ended. All homes withdraw layers that cannot stay at the same time, so that
/// an answer could not continue on other hosts.
async fn until_answered(host: &LayerHost, stop: &Stop) {
    let answered = async {
        let mut quiet_since = Instant::now();
        while quiet_since.elapsed() < ANSWERED {
            tokio::time::sleep(STEP_INTERVAL).await;
            if host.is_computing() {
                quiet_since = Instant::now();
            }
        }
    };
    tokio::select! {
        _ = tokio::time::timeout(LONGEST_ANSWER, answered) => {}
        () = stop.asked() => {}
    }
}

/// Stops to serve layers, of all these models at once.
async fn end_layers(parts: &Parts, hosted: impl IntoIterator<Item = ([u8; 32], Hosted)>) {
    let stopped = hosted.into_iter().map(|(weights, hosted)| {
        drop(hosted.stops);
        (weights, hosted.task)
    });
    for (weights, task) in stopped.collect::<Vec<_>>() {
        let _ = task.await;
        parts.end_serving(&weights);
    }
}

/// Resolves when the layers of a model end.
async fn ended(hosted: &mut BTreeMap<[u8; 32], Hosted>) -> ([u8; 32], Result<(), Failure>) {
    if hosted.is_empty() {
        return std::future::pending().await;
    }
    let all = hosted.iter_mut().map(|(weights, hosted)| {
        let weights = *weights;
        (&mut hosted.task).map(move |ended| (weights, ended))
    });
    let ((weights, ended), _, _) = select_all(all).await;
    (weights, ended.map_err(Failure::internal).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::adopted::adoption_for_test;

    #[test]
    fn new_sources_are_taken_and_another_file_is_another_model() {
        let model = Adoption {
            sources: vec!["hf:a/b/c.gguf".to_owned()],
            ..adoption_for_test("tiny", 3)
        };
        let corrected = Adoption {
            sources: vec!["hf:a/d/c.gguf".to_owned()],
            ..model.clone()
        };
        assert!(same_file(&model, &corrected));
        for other in [
            Adoption {
                head: [9; 32],
                ..model.clone()
            },
            Adoption {
                name: "other".to_owned(),
                ..model.clone()
            },
        ] {
            assert!(!same_file(&model, &other));
        }
        let followed = Followed::new(model.clone(), None);
        let told = followed.addresses.subscribe();
        assert!(!followed.take_sources(&model.sources));
        assert!(!told.has_changed().unwrap());
        assert!(followed.take_sources(&corrected.sources));
        assert!(told.has_changed().unwrap());
        assert_eq!(*told.borrow(), corrected.sources);
    }
}
