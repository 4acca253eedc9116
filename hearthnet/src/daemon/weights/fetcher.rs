//! Fetches pieces of one adopted model: from a path that a person has named first, then from
//! neighbours, then from the hub.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use futures_util::future::join_all;
use hearthnet_bus::log::Adoption;
use hearthnet_bus::node::Node;
use hearthnet_files::part::{Part, PartError, folder};
use hearthnet_hub::parts::{
    FetchError, FetchOptions, LocalSource, PieceSource, Progress, fetch, first_contact,
    stated_source,
};
use hearthnet_hub::pull::PullOptions;
use hearthnet_orchestrator::placement::room;
use hearthnet_transport::background;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::neighbour::Neighbour;
use super::room::Disk;
use super::store::{Parts, Purpose};
use crate::cli::{self, Failure, bytes, failure, note};
use crate::config::Config;
use crate::home::{Home, now_ms};
use crate::models::adopted::{identity, name_in_parts, parts_dir};
use crate::models::disk_limit;
use crate::node::link_rates::{LinkRates, RateMeter};
use crate::node::{DaemonNode, Download};

/// Time limit for a neighbour to accept a connection.
const REACH: Duration = Duration::from_secs(5);
/// Reports the first source that cannot be used.
static UNUSABLE: Once = Once::new();
/// Pause before sources are looked for again: the first one, and the longest.
const AGAIN: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(30);
/// Code of [`FetchError::NoSource`], while a fetch waits for a source.
const NO_SOURCE: &str = "no_source";
/// Shortest pause, also while neighbours come and go.
const SHORTEST: Duration = Duration::from_millis(500);

/// Fetches pieces of one model. Clones share it.
#[derive(Clone)]
pub(crate) struct Fetcher {
    pub(super) home: Home,
    pub(super) node: Node,
    /// Daemon that shows the download and waits for sources. `None` in a command, which fails
    /// without them.
    pub(super) daemon: Option<Arc<DaemonNode>>,
    pub(super) parts: Arc<Parts>,
    /// Bytes on the disk that parts may take; `None`: half of what is free or taken by them.
    pub(super) disk_limit: Option<u64>,
    pub(crate) model: Arc<Adoption>,
    /// Addresses of the whole file, as the community states them at present.
    pub(super) addresses: watch::Receiver<Vec<String>>,
    /// Path of `--from`. It is opened again with each attempt, because it may be a drive.
    pub(super) from: Option<Arc<LocalSource>>,
}

/// The path of `--from` as a source of a model.
pub(super) fn local_source(path: Option<&Path>, model: &Adoption) -> Option<Arc<LocalSource>> {
    let local = LocalSource::new(path?, &identity(model), &parts_dir().ok()?);
    Some(Arc::new(local))
}

/// Remedy for an error, beyond the error's own words.
fn helps(error: &FetchError) -> &'static str {
    match error {
        FetchError::NoSource { .. } | FetchError::NoObject { .. } => {
            "`hearthnet up --from PATH` takes it from a drive; a home that has the file offers it with \
             `hearthnet serve --model FILE`; an anchor corrects the sources by adopting the model again"
        }
        FetchError::Part(PartError::InUse(_)) => {
            "another home of yours, or a command, uses this part of the model"
        }
        _ => "",
    }
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
    /// Fetcher of a command.
    pub(crate) fn of_command(
        home: &Home,
        node: &Node,
        config: &Config,
        model: Adoption,
        from: Option<PathBuf>,
    ) -> Self {
        Self {
            home: home.clone(),
            node: node.clone(),
            daemon: None,
            parts: Arc::default(),
            disk_limit: disk_limit(config),
            addresses: watch::channel(model.sources.clone()).1,
            from: local_source(from.as_deref(), &model),
            model: Arc::new(model),
        }
    }

    /// The path of `--from` as a source.
    fn local(&self) -> Option<LocalSource> {
        Some(self.from.as_ref()?.again())
    }

    /// Checks that there is something of this model at the path of `--from`.
    pub(crate) async fn check_from(&self) -> Result<(), Failure> {
        let Some(local) = self.local() else {
            return Ok(());
        };
        let opened = tokio::task::spawn_blocking(move || {
            let name = local.name();
            local.open().map_err(|why| (name, why))
        });
        let opened = opened.await.map_err(Failure::internal)?;
        opened.map_err(|(path, why)| {
            failure!(Model, "{path} has nothing of {}: {why}", self.model.name)
                .code(why.code())
                .hint("without --from, members and the model's sources are asked")
        })
    }

    /// Opens the part of this model; fetches head, manifest and piece list if there is none yet.
    /// A daemon waits until a source has them. Neighbours may read the pieces from then on.
    pub(crate) async fn part(&self) -> Result<Arc<Part>, Failure> {
        let (parts, identity) = (parts_dir()?, identity(&self.model));
        // An attempt that failed later has left it open.
        let open = self.parts.get(&self.model.weights);
        if let Some(open) = open.filter(|part| *part.identity() == identity) {
            return Ok(open);
        }
        let part = self
            .until_done(move |sources, stop, news| {
                first_contact(&parts, &identity, &sources, news, stop)
            })
            .await?;
        let part = Arc::new(part);
        folder::enter(part.folder(), &name_in_parts(&self.home))
            .map_err(|e| Failure::file("write", part.folder(), e))?;
        self.parts.add(&part);
        Ok(part)
    }

    /// Fetches the pieces of layers that are to be served, as far as they are missing. A daemon
    /// waits until sources have them. They stay in use until other layers are served.
    pub(crate) async fn fetch(
        &self,
        part: &Arc<Part>,
        wanted: Vec<Range<u32>>,
    ) -> Result<(), Failure> {
        self.fetch_for(Purpose::Others, part, wanted, &[]).await
    }

    /// As [`Self::fetch`], while the pieces `served` are served: a host reads them again after it has
    /// unloaded its weights. They are given up only if the disk has no room for both.
    pub(crate) async fn fetch_beside(
        &self,
        part: &Arc<Part>,
        wanted: Vec<Range<u32>>,
        served: Vec<Range<u32>>,
    ) -> Result<(), Failure> {
        self.fetch_for(Purpose::Others, part, wanted, &served).await
    }

    /// Records that only these pieces are in use for others.
    pub(crate) fn serves(&self, part: &Part, pieces: Vec<Range<u32>>) {
        let weights = part.identity().weights;
        self.parts.set_use(&weights.0, Purpose::Others, pieces);
    }

    /// As [`Self::fetch`], for chats of this node.
    pub(crate) async fn fetch_for_chats(
        &self,
        part: &Arc<Part>,
        wanted: Vec<Range<u32>>,
    ) -> Result<(), Failure> {
        self.fetch_for(Purpose::Chats, part, wanted, &[]).await
    }

    async fn fetch_for(
        &self,
        purpose: Purpose,
        part: &Arc<Part>,
        wanted: Vec<Range<u32>>,
        beside: &[Range<u32>],
    ) -> Result<(), Failure> {
        if let Err(error) = folder::note_use(part.folder()) {
            tracing::info!("the use of a part is not recorded: {error}");
        }
        let both = [wanted.as_slice(), beside].concat();
        match self.make_room(purpose, part, &both).await {
            Err(_) if !beside.is_empty() => self.make_room(purpose, part, &wanted).await?,
            made => made?,
        }
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

    /// Gives up pieces that are not in use, as far as the wanted ones need their room.
    async fn make_room(
        &self,
        purpose: Purpose,
        part: &Arc<Part>,
        wanted: &[Range<u32>],
    ) -> Result<(), Failure> {
        let (parts, disk) = (Arc::clone(&self.parts), self.disk()?);
        let (part, wanted) = (Arc::clone(part), wanted.to_vec());
        let reserved =
            tokio::task::spawn_blocking(move || parts.reserve(&part, purpose, &wanted, &disk));
        let state = self.home.state();
        let given_up = reserved.await.map_err(Failure::internal)?;
        for (weights, given) in given_up.map_err(|why| why.failure(&self.model, &state))? {
            let known = state.model(&weights.0);
            let name = known.map_or("another model", |it| it.name.as_str());
            note(format!(
                "gave up {} of {name} on the disk for {} (manners.disk_gb)",
                bytes(given),
                self.model.name
            ));
        }
        Ok(())
    }

    fn disk(&self) -> Result<Disk, Failure> {
        let state = self.home.state();
        // The daemon opens the parts of all adopted models.
        let adopted = state.models().into_iter().map(|model| model.weights);
        Ok(Disk {
            parts: parts_dir()?,
            limit: self.disk_limit,
            reserved: match self.daemon {
                Some(_) => adopted.collect(),
                None => BTreeSet::new(),
            },
        })
    }

    /// Number of layers that fit on the disk, in the share of one of `models` models.
    ///
    /// # Errors
    /// Returns an error if not one does.
    pub(crate) async fn layers_on_disk(
        &self,
        part: &Arc<Part>,
        models: usize,
    ) -> Result<u32, Failure> {
        let (table, layers) = (part.table(), self.model.layers);
        let each = (0..layers).map(|layer| table.bytes(&table.of_layers(layer, layer)));
        let each: Vec<u64> = each.collect();
        // The user's own file takes no room.
        if part.is_shared() {
            return Ok(layers);
        }
        let asked = (Arc::clone(&self.parts), Arc::clone(part), self.disk()?);
        let space = tokio::task::spawn_blocking(move || {
            let (parts, part, disk) = asked;
            parts.room_for_layers(&part, &disk, models)
        });
        let space = space.await.map_err(Failure::internal)?;
        let space = space.map_err(|e| Failure::file("use", part.folder(), e))?;
        match room(space, &each) {
            0 => Err(failure!(
                Host,
                "not one layer of {} ({}) fits on the disk: parts of models may take {} more",
                self.model.name,
                bytes(each.iter().copied().max().unwrap_or_default()),
                bytes(space),
            )
            .code("disk_budget")
            .hint(
                "raise manners.disk_gb, or free some space; `hearthnet model list` shows what is on this \
                 machine",
            )),
            fit => Ok(fit),
        }
    }

    /// Whether served layers may stay on the disk, in the share of one of `models` models.
    pub(super) async fn keeps_layers(&self, part: &Arc<Part>, models: usize) -> bool {
        let Ok(disk) = self.disk() else {
            return false;
        };
        let (parts, part) = (Arc::clone(&self.parts), Arc::clone(part));
        let keeps = tokio::task::spawn_blocking(move || parts.keeps_layers(&part, &disk, models));
        matches!(keeps.await, Ok(Ok(true)))
    }

    /// Reads held pieces that could not be loaded. Those that the disk has damaged, or whose file was
    /// removed, are no longer held. Returns whether pieces have to be fetched again.
    pub(crate) async fn finds_damage(
        &self,
        part: &Arc<Part>,
        pieces: &[Range<u32>],
    ) -> Result<bool, Failure> {
        let (part, pieces) = (Arc::clone(part), pieces.to_vec());
        let (name, home) = (self.model.name.clone(), name_in_parts(&self.home));
        let read = background().spawn_blocking(move || {
            let unreadable = |error| Failure::file("read", &part.path(), error);
            let restored = part.restore();
            let is_restored =
                restored.map_err(|error| failure!(Model, "{name}: {error}").code(error.code()))?;
            if is_restored {
                // The file of this home was in the folder, too.
                folder::enter(part.folder(), &home).map_err(unreadable)?;
            }
            let mut each = pieces.iter().cloned().flatten();
            each.try_for_each(|index| part.read(index).map(drop))
                .map_err(unreadable)?;
            Ok::<_, Failure>(!part.missing(&pieces).is_empty())
        });
        read.await.map_err(Failure::internal)?
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
        let work = Arc::new(work);
        // The first attempt may come before this node is linked with its neighbours.
        let (mut said, mut attempts) = (String::new(), 0_u32);
        let (mut links, mut addresses) = (self.node.changes(), self.addresses.clone());
        let daemon = self.daemon.as_ref();
        let shown = daemon.map(|daemon| Arc::new(daemon.wait(&self.model.name)));
        loop {
            addresses.mark_unchanged();
            let sources = self.sources().await;
            let stop = Arc::new(AtomicBool::new(false));
            let _stops = StopOnDrop(Arc::clone(&stop));
            let (work, asked) = (Arc::clone(&work), Arc::clone(&stop));
            let waits = shown.clone();
            let show = move |code| waits.iter().for_each(|shown| shown.set(code));
            let runtime = Handle::current();
            // At the lowest priority, which the threads of the fetch inherit: neither a running answer
            // nor other programs wait for downloads and hashes, on the processor or at the disk.
            let mut done = background().spawn_blocking(move || {
                let _entered = runtime.enter();
                work(sources, &asked, &|progress| match progress {
                    Progress::Bytes { .. } => show(None),
                    Progress::Waiting { .. } => show(Some(NO_SOURCE)),
                    Progress::Dropped(dropped) => {
                        note(format!("no longer fetching from {dropped}"));
                    }
                    _ => {}
                })
            });
            let done = tokio::select! {
                done = &mut done => done,
                // The next attempt asks the new addresses.
                Ok(()) = addresses.changed() => {
                    stop.store(true, Ordering::Relaxed);
                    done.await
                }
            };
            let error = match done.map_err(Failure::internal)? {
                Ok(done) => return Ok(done),
                Err(FetchError::Stopped) => continue,
                Err(error) => error,
            };
            let hint = helps(&error);
            if self.daemon.is_none() || !may_pass(&error) {
                return Err(failure!(Model, "{}: {error}", self.model.name)
                    .code(error.code())
                    .hint(hint));
            }
            let why = error.to_string();
            attempts += 1;
            if let Some(shown) = shown.as_ref().filter(|_| attempts > 2) {
                shown.set(Some(error.code()));
            }
            if attempts > 2 && why != said {
                let name = &self.model.name;
                match hint {
                    "" => note(format!("{name}: {why}; trying again")),
                    hint => note(format!("{name}: {why}; trying again. {hint}")),
                }
                said = why;
            }
            // A new link may be to a neighbour that has the model.
            let news = async {
                tokio::select! {
                    _ = links.changed() => {}
                    Ok(()) = addresses.changed() => {}
                }
            };
            let pause = AGAIN
                .saturating_mul(1 << (attempts - 1).min(3))
                .min(LONGEST);
            tokio::time::sleep(SHORTEST).await;
            let _ = tokio::time::timeout(pause, news).await;
        }
    }

    /// The path of `--from`, members that can be reached, and the hub.
    async fn sources(&self) -> Vec<Arc<dyn PieceSource>> {
        let (node, state) = (&self.node, self.home.state());
        let peers = node.peers().into_iter();
        let peers = peers.filter(|peer| peer.level.is_some() && peer.link.is_some());
        let reached = join_all(peers.map(|peer| async move {
            let reached = tokio::time::timeout(REACH, node.weights_of(&peer.node));
            reached.await.ok()?.ok()
        }));
        let rates = self.daemon.as_ref();
        let rates = rates.map_or_else(LinkRates::default, |daemon| daemon.link_rates.clone());
        let mut sources: Vec<Arc<dyn PieceSource>> = Vec::new();
        if let Some(local) = self.local() {
            sources.push(Arc::new(local));
        }
        for peer in reached.await.into_iter().flatten() {
            sources.push(Arc::new(Neighbour {
                name: state.label(&peer.node(), now_ms()),
                meter: RateMeter {
                    node: peer.node(),
                    rates: rates.clone(),
                    window: Mutex::default(),
                },
                peer,
                weights: self.model.weights,
                runtime: Handle::current(),
            }));
        }
        let (Ok(options), Ok(parts)) = (PullOptions::from_environment(), parts_dir()) else {
            return sources;
        };
        let addresses = self.addresses.borrow().clone();
        for text in &addresses {
            match stated_source(text, &options, &identity(&self.model), &parts) {
                None => {}
                Some(Ok(hub)) => sources.push(hub),
                // Sources are looked for again and again.
                Some(Err(why)) => {
                    UNUSABLE.call_once(|| note(format!("{}: {why}", self.model.name)));
                }
            }
        }
        sources
    }
}
