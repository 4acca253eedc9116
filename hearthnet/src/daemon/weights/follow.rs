//! Follows what the community adopts and drops: opens chats with each adopted model, and serves
//! layers of each.
//!
//! Adopted models share the memory of this node equally. When their number changes, the layers of
//! all of them are withdrawn, and served again within the new share.
//!
//! What fails is tried again after a pause (`retry.rs`), and at once when the community's models
//! change. New sources of a model are asked at once; another file of it is opened like a new model.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{FutureExt, select_all};
use hearthnet_bus::log::Adoption;
use hearthnet_files::part::Part;
use hearthnet_orchestrator::Service;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::DropGuard;

use super::dropped::end_use;
use super::retry::Retry;
use super::{Fetcher, Parts};
use crate::answering::chat_setup::most_chats;
use crate::answering::private_layers;
use crate::cli::args::PrivateArgs;
use crate::cli::{Failure, Stop, note};
use crate::config::Context;
use crate::daemon::chats::add_model;
use crate::daemon::layer_events::EventSink;
use crate::daemon::layer_request::LayerRequest;
use crate::daemon::layers::LayerHost;
use crate::home::Home;
use crate::hosting::host_engine::HostEngine;
use crate::models::{OpenModel, open_part};
use crate::node::DaemonNode;

/// Time for ended engines to return their memory to the system, before it is divided anew.
const RETURNED: Duration = Duration::from_millis(500);

/// Everything that following needs.
pub(in crate::daemon) struct Follower {
    pub(in crate::daemon) cx: Context,
    pub(in crate::daemon) home: Home,
    pub(in crate::daemon) node: Arc<DaemonNode>,
    pub(in crate::daemon) layer_host: Arc<LayerHost>,
    pub(in crate::daemon) service: Service,
    pub(in crate::daemon) parts: Arc<Parts>,
    pub(in crate::daemon) private: PrivateArgs,
    /// Engine of the layers that this node serves; `None` if it serves none.
    pub(in crate::daemon) engine: Option<HostEngine>,
    pub(in crate::daemon) tell: EventSink,
}

/// An adopted model.
struct Followed {
    model: Arc<Adoption>,
    /// Its sources, for the fetches that run.
    addresses: watch::Sender<Vec<String>>,
    /// Number of the attempt to open it, and its task, while that runs.
    opening: Option<(u64, AbortHandle)>,
    retry: Retry,
    /// Attempts to serve its layers.
    hosting: Retry,
}

/// End of an attempt to open a model.
struct Opened {
    weights: [u8; 32],
    attempt: u64,
    result: Result<Usable, Failure>,
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

impl Follower {
    /// Follows the log until a stop.
    pub(in crate::daemon) async fn run(self, stop: Stop) -> Result<(), Failure> {
        let mut changes = self.home.log.changes();
        let mut followed: BTreeMap<[u8; 32], Followed> = BTreeMap::new();
        let mut usable: BTreeMap<[u8; 32], Usable> = BTreeMap::new();
        let (mut opening, mut attempts) = (JoinSet::new(), 0);
        let mut hosted: BTreeMap<[u8; 32], Hosted> = BTreeMap::new();
        let mut models = 0;
        loop {
            let state = self.home.state();
            let now: BTreeMap<[u8; 32], Adoption> = state
                .models()
                .into_iter()
                .map(|model| (model.weights, model.clone()))
                .collect();
            if now.len() != models {
                // All shares change.
                models = now.len();
                let ended = std::mem::take(&mut hosted);
                if !ended.is_empty() {
                    end_layers(&self.parts, ended).await;
                    tokio::time::sleep(RETURNED).await;
                }
            }
            let gone: Vec<_> = followed
                .extract_if(.., |weights, it| {
                    !now.get(weights)
                        .is_some_and(|new| same_file(new, &it.model))
                })
                .collect();
            let mut has_changed = !gone.is_empty();
            for (weights, it) in gone {
                end_layers(&self.parts, hosted.remove_entry(&weights)).await;
                if let Some((_, opening)) = it.opening {
                    opening.abort();
                }
                let is_dropped = !now.contains_key(&weights);
                self.end_model(&it.model, usable.remove(&weights), is_dropped);
            }
            for (weights, model) in now {
                has_changed |= match followed.get(&weights) {
                    Some(it) => it.take_sources(&model.sources),
                    None => {
                        followed.insert(weights, Followed::new(model));
                        true
                    }
                };
            }
            if has_changed {
                for it in followed.values_mut() {
                    it.retry.hurry();
                    it.hosting.hurry();
                }
            }
            for (weights, it) in &mut followed {
                let waits = it.opening.is_some() || usable.contains_key(weights);
                if waits || !it.retry.is_due(Instant::now()) {
                    continue;
                }
                attempts += 1;
                let open = Self::open(self.fetcher(it), self.cx.clone(), self.private);
                let (weights, attempt) = (*weights, attempts);
                let task = opening.spawn(async move {
                    Opened {
                        weights,
                        attempt,
                        result: open.await,
                    }
                });
                it.opening = Some((attempt, task));
            }
            for (weights, model) in &usable {
                let it = followed.get(weights);
                let is_due = it.is_some_and(|it| it.hosting.is_due(Instant::now()));
                if is_due && !hosted.contains_key(weights) {
                    let begun = self.host(model, models, &stop);
                    hosted.extend(begun.map(|begun| (*weights, begun)));
                }
            }
            let idle = followed
                .iter()
                .filter(|(weights, it)| it.opening.is_none() && !usable.contains_key(*weights));
            let idle = idle.filter_map(|(_, it)| it.retry.at());
            let layers = followed
                .iter()
                .filter(|(weights, _)| !hosted.contains_key(*weights))
                .filter_map(|(_, it)| it.hosting.at());
            // An attempt that is due has begun, or there is no model for it.
            let next = idle.chain(layers).filter(|at| *at > Instant::now()).min();
            tokio::select! {
                () = stop.asked() => break,
                _ = changes.changed() => {}
                Some(opened) = opening.join_next() => {
                    let opened = match opened {
                        // Of a dropped model.
                        Err(error) if error.is_cancelled() => continue,
                        Err(error) => {
                            note(format!("an adopted model cannot be used: {error}"));
                            continue;
                        }
                        Ok(opened) => opened,
                    };
                    let attempt = opened.attempt;
                    let it = followed.get_mut(&opened.weights);
                    // The attempt may be one before the model was dropped and adopted again.
                    let it = it.filter(|it| it.opening.as_ref().is_some_and(|o| o.0 == attempt));
                    let Some(it) = it else {
                        continue;
                    };
                    it.opening = None;
                    let added = opened.result.and_then(|it| {
                        add_model(&self.service, &self.node, &self.home, &it.model, &self.cx.config)?;
                        Ok(it)
                    });
                    match added {
                        Ok(opened) => {
                            it.retry = Retry::default();
                            usable.insert(it.model.weights, opened);
                        }
                        Err(why) => {
                            self.parts.end_use(&it.model.weights);
                            let what = format!("the adopted model {} cannot be used", it.model.name);
                            again(&mut it.retry, &what, &why);
                        }
                    }
                }
                (weights, ended) = ended(&mut hosted) => {
                    hosted.remove(&weights);
                    self.parts.end_serving(&weights);
                    if let (Err(why), Some(it)) = (ended, followed.get_mut(&weights)) {
                        let what = format!("no layers of {} are served", it.model.name);
                        again(&mut it.hosting, &what, &why);
                    }
                }
                () = until(next) => {}
            }
        }
        for hosted in hosted.into_values() {
            let _ = hosted.task.await;
        }
        Ok(())
    }

    fn fetcher(&self, it: &Followed) -> Fetcher {
        Fetcher::of_daemon(
            &self.home,
            &self.node,
            &self.parts,
            &self.cx.config,
            &it.model,
            it.addresses.subscribe(),
        )
    }

    /// Fetches what a chat with the model needs here: the head, and the private layers.
    async fn open(fetcher: Fetcher, cx: Context, args: PrivateArgs) -> Result<Usable, Failure> {
        let part = fetcher.part().await?;
        let opened = {
            let (cx, part, name) = (cx.clone(), Arc::clone(&part), fetcher.model.name.clone());
            tokio::task::spawn_blocking(move || open_part(&cx, &name, &part)).await
        };
        let mut model = opened.map_err(Failure::internal).flatten()?;
        let table = part.table();
        let mut wanted = table.of_head();
        for (lo, hi) in private_layers::wanted(&model, args, &cx.config)? {
            wanted.extend(table.of_layers(lo, hi));
        }
        fetcher.fetch_for_chats(&part, wanted.clone()).await?;
        fetcher.forget_damaged(&part, &wanted).await?;
        fetcher.fetch_for_chats(&part, wanted).await?;
        let loaded = tokio::task::spawn_blocking(move || {
            private_layers::load(&mut model, args, most_chats(&cx.config), &cx.config)?;
            Ok::<_, Failure>(model)
        });
        let model = loaded.await.map_err(Failure::internal).flatten()?;
        Ok(Usable {
            model,
            fetcher,
            part,
        })
    }

    /// Begins to serve layers of one of `models` adopted models, if this node serves layers.
    fn host(&self, chosen: &Usable, models: usize, stop: &Stop) -> Option<Hosted> {
        let engine = self.engine.clone()?;
        let request = LayerRequest {
            model: chosen.model.clone(),
            layers: self.cx.config.serve_layers(),
            threads: None,
            engine,
            fetch: Some((chosen.fetcher.clone(), Arc::clone(&chosen.part))),
            models,
        };
        let (stop, stops) = stop.or_dropped();
        let (host, tell) = (Arc::clone(&self.layer_host), Arc::clone(&self.tell));
        Some(Hosted {
            task: tokio::spawn(async move { host.serve(request, tell, stop).await }),
            stops,
        })
    }

    /// Ends the use of a model that was dropped, or adopted with another file. The part of a dropped
    /// model is removed from the disk.
    fn end_model(&self, model: &Adoption, usable: Option<Usable>, is_dropped: bool) {
        let open = self.parts.remove(&model.weights);
        if let Some(usable) = usable {
            self.service.remove_model(&usable.model.id);
        }
        let name = &model.name;
        if is_dropped {
            note(format!("{name} was dropped by the community"));
            end_use(&self.home, model, open);
        } else {
            note(format!(
                "another file of {name} was adopted by the community"
            ));
        }
    }
}

impl Followed {
    fn new(model: Adoption) -> Self {
        Self {
            addresses: watch::Sender::new(model.sources.clone()),
            model: Arc::new(model),
            opening: None,
            retry: Retry::default(),
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
    let hint = why.hint_text().map_or(String::new(), |h| format!(" ({h})"));
    if let Some(pause) = retry.failed(Instant::now(), why.to_string()) {
        let seconds = pause.as_secs();
        note(format!("{what}: {why}{hint}; trying again in {seconds} s"));
    }
}

/// Resolves at a time; never without one.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
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

    #[test]
    fn new_sources_are_taken_and_another_file_is_another_model() {
        let model = Adoption {
            head: [1; 32],
            name: "tiny".to_owned(),
            layers: 2,
            pieces: [2; 32],
            sources: vec!["hf:a/b/c.gguf".to_owned()],
            weights: [3; 32],
            file_bytes: 4096,
            head_bytes: 1024,
            manifest_bytes: 512,
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
        let followed = Followed::new(model.clone());
        let told = followed.addresses.subscribe();
        assert!(!followed.take_sources(&model.sources));
        assert!(!told.has_changed().unwrap());
        assert!(followed.take_sources(&corrected.sources));
        assert!(told.has_changed().unwrap());
        assert_eq!(*told.borrow(), corrected.sources);
    }
}
