//! Follows what the community adopts and drops: opens chats with each adopted model, and serves
//! layers of one of them.
//!
//! This node serves one range of one model at a time. It takes the adopted model of which most
//! layers are missing, and of several the first by name.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use hearthnet_bus::log::Adoption;
use hearthnet_files::part::Part;
use hearthnet_orchestrator::Service;
use hearthnet_orchestrator::coverage::held_by_others;
use hearthnet_orchestrator::placement::missing;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio_util::sync::DropGuard;

use super::{Fetcher, Parts};
use crate::answering::chat_setup::most_chats;
use crate::answering::private_layers;
use crate::cli::args::{Layers, PrivateArgs};
use crate::cli::{Failure, Stop, note};
use crate::config::Context;
use crate::daemon::chats::add_model;
use crate::daemon::layers::{EventSink, LayerHost, LayerRequest};
use crate::home::{Home, now_ms};
use crate::hosting::host_engine::HostEngine;
use crate::models::adopted::part_folder;
use crate::models::{OpenModel, open_part};
use crate::node::DaemonNode;

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

/// An adopted model that can be used here.
struct Usable {
    model: OpenModel,
    fetcher: Fetcher,
    part: Arc<Part>,
}

/// Layers that are being served.
struct Hosted {
    weights: [u8; 32],
    task: JoinHandle<Result<(), Failure>>,
    /// Stops the layers when dropped.
    stops: DropGuard,
}

impl Follower {
    /// Follows the log until a stop.
    pub(in crate::daemon) async fn run(self, stop: Stop) -> Result<(), Failure> {
        let mut changes = self.home.log.changes();
        // Adopted models, with the tasks that open them.
        let mut adopted: BTreeMap<[u8; 32], (Arc<Adoption>, AbortHandle)> = BTreeMap::new();
        let mut usable: BTreeMap<[u8; 32], Usable> = BTreeMap::new();
        let mut opening = JoinSet::new();
        let mut hosted: Option<Hosted> = None;
        // Layers that failed are tried again when the community's models change.
        let mut has_failed = false;
        loop {
            let state = self.home.state();
            let now: BTreeMap<[u8; 32], Adoption> = state
                .models()
                .into_iter()
                .map(|model| (model.weights, model.clone()))
                .collect();
            let gone: Vec<_> = adopted
                .extract_if(.., |weights, _| !now.contains_key(weights))
                .collect();
            for (weights, (model, opening)) in gone {
                if let Some(hosted) = hosted.take_if(|hosted| hosted.weights == weights) {
                    drop(hosted.stops);
                    let _ = hosted.task.await;
                }
                opening.abort();
                self.drop_model(&model, usable.remove(&weights));
                has_failed = false;
            }
            for (weights, model) in now {
                if let Entry::Vacant(new) = adopted.entry(weights) {
                    let model = Arc::new(model);
                    let fetcher = self.fetcher(Arc::clone(&model));
                    let open = Self::open(
                        fetcher,
                        Arc::clone(&self.parts),
                        self.cx.clone(),
                        self.private,
                    );
                    new.insert((model, opening.spawn(open)));
                    has_failed = false;
                }
            }
            if hosted.is_none() && !has_failed {
                hosted = self.host(&usable, &stop);
            }
            tokio::select! {
                () = stop.asked() => break,
                _ = changes.changed() => {}
                Some(opened) = opening.join_next() => {
                    let opened = match opened {
                        // Of a dropped model.
                        Err(error) if error.is_cancelled() => continue,
                        opened => opened.map_err(Failure::internal).flatten(),
                    };
                    match opened {
                        Ok(it) if adopted.contains_key(&it.fetcher.model.weights) => {
                            add_model(&self.service, &self.node, &self.home, &it.model, &self.cx.config)?;
                            usable.insert(it.fetcher.model.weights, it);
                        }
                        Ok(_) => {}
                        Err(why) => note(format!("an adopted model cannot be used: {why}")),
                    }
                }
                ended = ended(&mut hosted) => {
                    hosted = None;
                    match ended {
                        Ok(()) => {}
                        Err(why) => {
                            note(format!("layers are no longer served: {why}"));
                            has_failed = true;
                        }
                    }
                }
            }
        }
        if let Some(hosted) = hosted {
            let _ = hosted.task.await;
        }
        Ok(())
    }

    fn fetcher(&self, model: Arc<Adoption>) -> Fetcher {
        Fetcher {
            home: self.home.clone(),
            node: self.node.node.clone(),
            daemon: Some(Arc::clone(&self.node)),
            model,
        }
    }

    /// Fetches what a chat with the model needs here: the head, and the private layers.
    /// Neighbours may read pieces as soon as they are here.
    async fn open(
        fetcher: Fetcher,
        parts: Arc<Parts>,
        cx: Context,
        args: PrivateArgs,
    ) -> Result<Usable, Failure> {
        let part = fetcher.part().await?;
        parts.add(&part);
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
        fetcher.fetch(&part, wanted.clone()).await?;
        fetcher.forget_damaged(&part, &wanted).await?;
        fetcher.fetch(&part, wanted).await?;
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

    /// Begins to serve layers of the model that lacks most, if this node serves layers.
    fn host(&self, usable: &BTreeMap<[u8; 32], Usable>, stop: &Stop) -> Option<Hosted> {
        let engine = self.engine.clone()?;
        let state = self.home.state();
        let own = self.home.key.id();
        let lacks = |it: &&Usable| {
            let total = it.model.file.spec().layers;
            let weights = it.model.weights.to_string();
            let others = held_by_others(state.shards(now_ms()), own, &weights, total);
            let held: Vec<(u32, u32)> = others.into_iter().map(|held| held.range).collect();
            let runs = missing(total, &held).into_iter();
            let lacking: u32 = runs.map(|(lo, hi)| hi - lo + 1).sum();
            (lacking, std::cmp::Reverse(it.model.id.clone()))
        };
        let chosen = usable.values().max_by_key(lacks)?;
        let request = LayerRequest {
            model: chosen.model.clone(),
            layers: Layers::Auto,
            threads: None,
            engine,
            fetch: Some((chosen.fetcher.clone(), Arc::clone(&chosen.part))),
        };
        let (stop, stops) = stop.or_dropped();
        let (host, tell) = (Arc::clone(&self.layer_host), Arc::clone(&self.tell));
        Some(Hosted {
            weights: chosen.fetcher.model.weights,
            task: tokio::spawn(async move { host.serve(request, tell, stop).await }),
            stops,
        })
    }

    /// Ends the use of a dropped model, and removes its part from the disk.
    fn drop_model(&self, model: &Adoption, usable: Option<Usable>) {
        self.parts.remove(&model.weights);
        if let Some(usable) = usable {
            self.service.remove_model(&usable.model.id);
        }
        note(format!("{} was dropped by the community", model.name));
        let Some(folder) = part_folder(model) else {
            return;
        };
        if let Err(error) = std::fs::remove_dir_all(&folder) {
            note(format!("{} cannot be removed: {error}", folder.display()));
        }
    }
}

/// Resolves when the hosted layers end.
async fn ended(hosted: &mut Option<Hosted>) -> Result<(), Failure> {
    match hosted {
        Some(hosted) => (&mut hosted.task)
            .await
            .map_err(Failure::internal)
            .flatten(),
        None => std::future::pending().await,
    }
}
