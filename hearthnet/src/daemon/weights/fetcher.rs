//! Fetches pieces of one adopted model: from neighbours first, then from the hub.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use hearthnet_bus::log::Adoption;
use hearthnet_bus::node::Node;
use hearthnet_files::part::Part;
use hearthnet_hub::ModelRef;
use hearthnet_hub::parts::{
    FetchError, FetchOptions, HubSource, PieceSource, Progress, fetch, first_contact,
};
use hearthnet_hub::pull::PullOptions;
use tokio::runtime::Handle;

use super::neighbour::Neighbour;
use crate::cli::{self, Failure, bytes, failure, note};
use crate::home::{Home, now_ms};
use crate::models::adopted::{identity, parts_dir};
use crate::node::{DaemonNode, Download};

/// Time limit for a neighbour to accept a connection.
const REACH: Duration = Duration::from_secs(5);
/// Pause before sources are looked for again.
const AGAIN: Duration = Duration::from_secs(5);

/// Fetches pieces of one model. Clones share it.
#[derive(Clone)]
pub(crate) struct Fetcher {
    pub(crate) home: Home,
    pub(crate) node: Node,
    /// Daemon that shows the download and waits for sources. `None` in a command, which fails
    /// without them.
    pub(crate) daemon: Option<Arc<DaemonNode>>,
    pub(crate) model: Arc<Adoption>,
}

/// Whether the same fetch may succeed later.
fn may_pass(error: &FetchError) -> bool {
    matches!(
        error,
        FetchError::NoSource { .. } | FetchError::NoObject { .. } | FetchError::DiskFull { .. }
    )
}

/// Stops a fetch when the future that waits for it is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Fetcher {
    /// Opens the part of this model; fetches head, manifest and piece list if there is none yet.
    /// A daemon waits until a source has them.
    pub(crate) async fn part(&self) -> Result<Arc<Part>, Failure> {
        let (parts, identity) = (parts_dir()?, identity(&self.model));
        let part = self
            .until_done(move |sources, stop, news| {
                first_contact(&parts, &identity, &sources, news, stop)
            })
            .await?;
        Ok(Arc::new(part))
    }

    /// Fetches the pieces of a part that are wanted and missing. A daemon waits until sources
    /// have them.
    pub(crate) async fn fetch(
        &self,
        part: &Arc<Part>,
        wanted: Vec<Range<u32>>,
    ) -> Result<(), Failure> {
        let missing = part.table().bytes(&part.missing(&wanted));
        if missing == 0 {
            return Ok(());
        }
        let name = self.model.name.clone();
        note(format!("fetching {} of {name}", bytes(missing)));
        let told = self.daemon.as_ref().map(|daemon| {
            daemon.download(Download {
                name: name.clone(),
                done: 0,
                total: missing,
            })
        });
        let bar = self
            .daemon
            .is_none()
            .then(|| cli::Progress::new("fetching"));
        let (part, seed) = (Arc::clone(part), self.seed());
        let report = self
            .until_done(move |sources, stop, news| {
                let options = FetchOptions {
                    seed,
                    ..FetchOptions::default()
                };
                let tell = |progress: Progress<'_>| {
                    if let Progress::Bytes { done, total } = progress {
                        // An earlier attempt may have fetched some.
                        let done = missing.saturating_sub(total - done);
                        if let Some(told) = &told {
                            told.set(done);
                        }
                        if let Some(bar) = &bar {
                            bar.set(done, missing);
                        }
                    }
                    news(progress);
                };
                fetch(&part, &wanted, sources, &options, &tell, stop)
            })
            .await?;
        let from: Vec<String> = report
            .bytes
            .iter()
            .filter(|(_, sent)| *sent > 0)
            .map(|(name, sent)| format!("{} from {name}", bytes(*sent)))
            .collect();
        note(format!(
            "fetched {name} in {:.1} s: {}",
            report.time.as_secs_f64(),
            from.join(", ")
        ));
        Ok(())
    }

    /// Reads held pieces. Those that the disk has damaged are no longer held.
    pub(crate) async fn forget_damaged(
        &self,
        part: &Arc<Part>,
        pieces: &[Range<u32>],
    ) -> Result<(), Failure> {
        let (part, pieces) = (Arc::clone(part), pieces.to_vec());
        let read = tokio::task::spawn_blocking(move || {
            let mut each = pieces.into_iter().flatten();
            each.try_for_each(|index| part.read(index).map(drop))
        });
        read.await
            .map_err(Failure::internal)?
            .map_err(Failure::internal)
    }

    /// Differs from node to node, so that nodes that begin together fetch different pieces first.
    fn seed(&self) -> u64 {
        let id = self.home.key.id();
        let first = id.as_bytes().first_chunk().copied();
        u64::from_le_bytes(first.unwrap_or_default())
    }

    /// Repeats `work` with the sources of the moment until it is done, or fails for good.
    async fn until_done<T: Send + 'static>(
        &self,
        work: impl Fn(
            Vec<Arc<dyn PieceSource>>,
            &AtomicBool,
            &(dyn Fn(Progress<'_>) + Sync),
        ) -> Result<T, FetchError>
        + Send
        + Sync
        + 'static,
    ) -> Result<T, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let _stops = StopOnDrop(Arc::clone(&stop));
        let work = Arc::new(work);
        // The first attempt may come before this node is linked with its neighbours.
        let (mut said, mut attempts) = (String::new(), 0);
        let mut links = self.node.changes();
        loop {
            let sources = self.sources().await;
            let (work, stop) = (Arc::clone(&work), Arc::clone(&stop));
            let done = tokio::task::spawn_blocking(move || {
                work(sources, &stop, &|progress| {
                    if let Progress::Dropped(dropped) = progress {
                        note(format!("no longer fetching from {dropped}"));
                    }
                })
            });
            let why = match done.await.map_err(Failure::internal)? {
                Ok(done) => return Ok(done),
                Err(error) if self.daemon.is_some() && may_pass(&error) => error.to_string(),
                Err(error) => {
                    return Err(failure!(Model, "{}: {error}", self.model.name).code(error.code()));
                }
            };
            attempts += 1;
            if attempts > 2 && why != said {
                note(format!("{}: {why}; trying again", self.model.name));
                said = why;
            }
            // A new link may be to a neighbour that has the model.
            let _ = tokio::time::timeout(AGAIN, links.changed()).await;
        }
    }

    /// Members that can be reached, and the hub.
    async fn sources(&self) -> Vec<Arc<dyn PieceSource>> {
        let (node, state) = (&self.node, self.home.state());
        let peers = node.peers().into_iter();
        let peers = peers.filter(|peer| peer.level.is_some() && peer.link.is_some());
        let reached = join_all(peers.map(|peer| async move {
            let reached = tokio::time::timeout(REACH, node.weights_of(&peer.node));
            reached.await.ok()?.ok()
        }));
        let mut sources: Vec<Arc<dyn PieceSource>> = Vec::new();
        for peer in reached.await.into_iter().flatten() {
            sources.push(Arc::new(Neighbour {
                name: state.label(&peer.node(), now_ms()),
                peer,
                weights: self.model.weights,
                runtime: Handle::current(),
            }));
        }
        let Ok(options) = PullOptions::from_environment() else {
            return sources;
        };
        for text in &self.model.sources {
            let Ok(ModelRef::Remote(source)) = text.parse() else {
                continue;
            };
            match HubSource::new(&source, &options, self.model.file_bytes) {
                Ok(hub) => sources.push(Arc::new(hub)),
                Err(why) => tracing::info!("{why}"),
            }
        }
        sources
    }
}
