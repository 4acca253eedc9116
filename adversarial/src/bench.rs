//! What an attack gets to work with: a victim, an honest caller beside it, and connections of
//! its own, down to the byte.

use std::path::{Path, PathBuf};

use hearthnet_bus::invite::Invite;
use hearthnet_bus::joining::join_through;
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::{Grant, NodeKey};
use hearthnet_orchestrator::link::HostAddr;

use crate::caller::{self, Called};
use crate::honest::Honest;
use crate::raw::event::now_ms;
use crate::raw::{Credentials, Ending, Frame, Gossip, Hello, Peer, Step, kind, stream_open};
use crate::target::grant;
pub(crate) use crate::target::{Target, token};
use crate::test_community::TestCommunity;
use crate::victim::until;
use crate::victim::{Gauges, Model, Pace, Scene, Settings, Victim};
use crate::{Findings, HarnessError};

/// The bench on which one attack is carried out.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) victim: Victim,
    pub(crate) honest: Honest,
    /// Using it is what only the honest caller could do.
    pub(crate) honest_key: NodeKey,
    pub(crate) target: Target,
    pub(crate) guest: NodeKey,
    /// Which the victim admits.
    pub(crate) attacker: NodeKey,
    test_community: Option<TestCommunity>,
    program: PathBuf,
    pub(crate) which: Model,
    guest_key: PathBuf,
    pace: Pace,
    /// Holds the model file until the victim is gone.
    pub(crate) _files: tempfile::TempDir,
}

impl Bench {
    /// Starts a victim with a tiny model, and an honest caller at work on it. `program` is the
    /// suite's own program, which is also the victim's.
    pub(crate) async fn start(
        program: &Path,
        pace: Pace,
        scene: Scene,
        which: Model,
    ) -> Result<Bench, HarnessError> {
        let files = tempfile::tempdir()?;
        let model = which.description();
        let (attacker, honest_key) = (new_key()?, new_key()?);
        // In a file, for a guest that is a process of its own.
        let guest_key = files.path().join("guest.key");
        let guest = NodeKey::load_or_create(&guest_key)?;
        let mut settings = Settings {
            model: model.write(files.path()),
            which,
            admitted: vec![attacker.id(), honest_key.id(), guest.id()],
            home: None,
            pace,
            kv_pages: scene.kv_pages,
        };
        let mut test_community = None;
        if scene.community {
            let honest = [honest_key.id()];
            let founded = TestCommunity::found(files.path(), &attacker, &guest, &honest)?;
            settings.home = Some(founded.home("victim")?);
            test_community = Some(founded);
        }
        let victim = Victim::start(program, &settings).await?;
        if let Some(test_community) = &mut test_community {
            test_community.link(&victim).await?;
        }
        let mut weights = [0; 32];
        hex::decode_to_slice(&victim.descriptor.weights_sha256, &mut weights)?;
        let target = Target {
            addr: victim.addr,
            node: victim.node,
            weights,
            layers: victim.descriptor.layer_range,
            width: model.width,
            grants: scene.community,
        };
        let honest = Honest::begin(&target, &honest_key, None).await?;
        Ok(Bench {
            victim,
            honest,
            honest_key,
            target,
            guest,
            attacker,
            test_community,
            program: program.to_owned(),
            which,
            guest_key,
            pace,
            _files: files,
        })
    }

    /// The victim's community.
    ///
    /// # Errors
    /// If the attack did not ask for one.
    pub(crate) fn test_community(&mut self) -> Result<&mut TestCommunity, HarnessError> {
        self.test_community.as_mut().ok_or_else(in_no_community)
    }

    /// A gossip session of a member with the victim.
    pub(crate) async fn gossip(&mut self, key: &NodeKey) -> Result<Gossip, HarnessError> {
        let community = self.test_community()?.community;
        Gossip::open(self.target.addr, key, &community).await
    }

    /// That the community goes on as if nothing had happened.
    pub(crate) async fn goes_on(&mut self, found: &mut Findings) -> Result<(), HarnessError> {
        let test_community = self.test_community.as_ref().ok_or_else(in_no_community)?;
        test_community.goes_on(&mut self.victim, found).await
    }

    /// Asks the victim until its numbers are so, as they must come to be.
    pub(crate) async fn comes_to(
        &mut self,
        found: &mut Findings,
        what: &str,
        expected: &str,
        so: impl Fn(&Gauges) -> bool,
    ) -> Result<(), HarnessError> {
        let gauges = until(&mut self.victim, &so).await?;
        found.holds(what, expected, so(&gauges));
        Ok(())
    }

    /// The victim has heard what the anchor wrote.
    pub(crate) async fn agrees(&mut self, found: &mut Findings) -> Result<(), HarnessError> {
        let state = self.test_community()?.state();
        let what = "the host hears of what the anchor wrote";
        self.comes_to(found, what, "true", |gauges| gauges.state() == state)
            .await
    }

    /// Somebody with a code joins through the victim, once and without patience.
    pub(crate) async fn join(&mut self, invite: &Invite) -> Result<Level, HarnessError> {
        let key = new_key()?;
        let request = invite.request(key.id(), "kim")?;
        let home = tempfile::tempdir()?;
        let log = EventLog::prepare(home.path(), invite.community())?;
        let (client, expected) = (self.target.client(&key).await?, self.target.node);
        let joined = join_through(&client, expected, &request, &log, now_ms, |_| {}).await;
        joined.map_err(HarnessError::honest)
    }

    /// What becomes of the guest, in a process of its own, when it opens a session with a host.
    pub(crate) async fn call(&self, host: &HostAddr) -> Result<Called, HarnessError> {
        caller::start(&self.program, &self.guest_key, host).await
    }

    /// The suite's own program.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Starts another node like the victim, in a folder that [`TestCommunity::home`] made.
    pub(crate) async fn another(&self, home: &Path) -> Result<Victim, HarnessError> {
        let settings = Settings {
            model: self.which.description().write(self._files.path()),
            which: self.which,
            admitted: Vec::new(),
            home: Some(home.to_owned()),
            pace: self.pace,
            kv_pages: None,
        };
        Victim::start(&self.program, &settings).await
    }

    /// A copy of the attacker's key, and one of the guest's.
    pub(crate) fn members(&self) -> [NodeKey; 2] {
        [&self.attacker, &self.guest].map(|key| NodeKey::from_secret(&key.secret()))
    }

    /// What a valid token of this node says: to be signed, or changed first.
    pub(crate) fn grant(&self, key: &NodeKey) -> Result<Grant, HarnessError> {
        grant(key, self.target.node)
    }

    /// How the victim answers a HELLO with this token from the attacker. A session that it opens
    /// is closed again.
    ///
    /// # Errors
    /// If the attacker does not get as far as HELLO.
    pub(crate) async fn show(&self, token: Vec<u8>) -> Result<Ending, HarnessError> {
        let mut peer = self.upgraded().await?;
        peer.send(Hello::new("pipeline", token).frame()).await;
        let answer = peer.receive().await;
        let opened = Ending {
            opened: true,
            ..Ending::default()
        };
        Ok(match answer.is(kind::HELLO) {
            true => opened,
            false => peer.ending_after(answer).await,
        })
    }

    /// The attacker's HELLO for a purpose (`pipeline`, `bench`), with a fresh, valid token.
    pub(crate) fn hello(&self, purpose: &str) -> Result<Hello, HarnessError> {
        let token = token(&self.attacker, self.target.node)?;
        Ok(Hello::new(purpose, token))
    }

    fn credentials(&self) -> Credentials {
        Credentials::of(&self.attacker.secret())
    }

    /// The attacker's connection, as far as TLS.
    pub(crate) async fn secured(&self) -> Result<Peer, HarnessError> {
        self.secured_with(&self.credentials()).await
    }

    /// A connection with any credentials, as far as TLS.
    pub(crate) async fn secured_with(
        &self,
        credentials: &Credentials,
    ) -> Result<Peer, HarnessError> {
        Ok(Peer::secured(self.target.addr, credentials).await?)
    }

    /// The attacker's connection, as far as the WebSocket.
    pub(crate) async fn upgraded(&self) -> Result<Peer, HarnessError> {
        Ok(Peer::upgraded(self.target.addr, &self.credentials()).await?)
    }

    /// The attacker's session, with a HELLO of its own.
    pub(crate) async fn session(&self, hello: &Hello) -> Result<Peer, HarnessError> {
        Ok(self.upgraded().await?.greeted(hello).await?)
    }

    /// The attacker's session for running rows.
    pub(crate) async fn pipeline(&self) -> Result<Peer, HarnessError> {
        self.session(&self.hello("pipeline")?).await
    }

    /// A STREAM_OPEN that the victim takes: epoch 1 of this stream, all of its layers.
    pub(crate) fn stream_open(&self, stream: u32) -> Frame {
        stream_open(stream, &self.target.weights, self.target.layers, 16)
    }

    /// The attacker's session with stream 1 open.
    pub(crate) async fn stream(&self) -> Result<Peer, HarnessError> {
        let mut peer = self.pipeline().await?;
        peer.send(self.stream_open(1)).await;
        let answer = peer.receive().await;
        match answer.is(kind::STREAM_OPENED) {
            true => Ok(peer),
            false => Err(HarnessError::attacker(format!("no stream: {answer:?}"))),
        }
    }

    /// A step of a stream at its beginning that the victim takes: so many rows of zeros.
    pub(crate) fn zeros(&self, stream: u32, rows: u32) -> Step {
        let width = self.target.width;
        Step {
            stream,
            rows,
            width,
            data: vec![0; (rows * width) as usize * 2],
            ..Step::default()
        }
    }
}

fn in_no_community() -> HarnessError {
    HarnessError::attacker("the victim is in no community")
}

/// The key of a new node.
pub(crate) fn new_key() -> Result<NodeKey, HarnessError> {
    Ok(NodeKey::generate()?)
}
