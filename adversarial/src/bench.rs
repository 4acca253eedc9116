//! Test bench of an attack: a victim, an honest caller beside it, and raw connections of the
//! attacker.

use std::path::{Path, PathBuf};

use hearthnet_bus::invite::Invite;
use hearthnet_bus::joining::join_through;
use hearthnet_bus::log::{EventLog, Level};
use hearthnet_bus::{Grant, NodeId, NodeKey};

use crate::honest::Honest;
use crate::raw::{
    Credentials, Ending, Frame, Gossip, Hello, Peer, SWITCHING, Step, kind, stream_open,
};
use crate::target::grant;
pub(crate) use crate::target::{Target, token};
use crate::test_community::TestCommunity;
use crate::victim::until;
use crate::victim::{Gauges, Model, Pace, Scene, Settings, Victim};
use crate::{Findings, HarnessError, Result};

/// Test bench on which one attack is carried out.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) victim: Victim,
    pub(crate) honest: Honest,
    /// Key of the honest caller. An attack may use it only to do what the honest caller could do.
    pub(crate) honest_key: NodeKey,
    pub(crate) target: Target,
    pub(crate) guest: NodeKey,
    /// Key of the attacker, which the victim admits.
    pub(crate) attacker: NodeKey,
    test_community: Option<TestCommunity>,
    program: PathBuf,
    pub(crate) which: Model,
    /// File of the model.
    model: PathBuf,
    pace: Pace,
    /// Keeps the model file until the victim has ended.
    pub(crate) _files: tempfile::TempDir,
}

impl Bench {
    /// Starts a victim with a tiny model and an honest caller at work on it. `program` is the
    /// suite's own program, which also runs as the victim.
    pub(crate) async fn start(
        program: &Path,
        pace: Pace,
        scene: Scene,
        which: Model,
    ) -> Result<Bench> {
        let files = tempfile::tempdir()?;
        let model = which.file(files.path())?;
        let (attacker, honest_key, guest) = (new_key()?, new_key()?, new_key()?);
        let mut settings = Settings {
            model: model.clone(),
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
            width: which.description().width,
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
            model,
            pace,
            _files: files,
        })
    }

    /// Community of the victim.
    ///
    /// # Errors
    /// If the attack did not ask for a community.
    pub(crate) fn community(&mut self) -> Result<&mut TestCommunity> {
        self.test_community.as_mut().ok_or_else(in_no_community)
    }

    /// Opens a gossip session of a member with the victim.
    pub(crate) async fn gossip(&mut self, key: &NodeKey) -> Result<Gossip> {
        let community = self.community()?.community;
        Gossip::open(self.target.addr, key, &community).await
    }

    /// Pushes events as a member, in a new gossip session. The victim must store all of them.
    pub(crate) async fn stores(
        &mut self,
        found: &mut Findings,
        what: &str,
        key: &NodeKey,
        events: &[Vec<u8>],
    ) -> Result<()> {
        let pushed = self.gossip(key).await?.push(events).await;
        found.taken(what, (events.len() as u64, 0), None, &pushed);
        Ok(())
    }

    /// Checks that new events still reach the victim and that its state matches the anchor's.
    pub(crate) async fn still_works(&mut self, found: &mut Findings) -> Result<()> {
        let test_community = self.test_community.as_ref().ok_or_else(in_no_community)?;
        test_community.still_works(&mut self.victim, found).await
    }

    /// Polls the victim until its gauges satisfy `so`.
    pub(crate) async fn wait_until(
        &mut self,
        found: &mut Findings,
        what: &str,
        expected: &str,
        so: impl Fn(&Gauges) -> bool,
    ) -> Result<()> {
        let gauges = until(&mut self.victim, &so).await?;
        found.holds(what, expected, so(&gauges));
        Ok(())
    }

    /// Checks that the victim reaches the state of the anchor's log.
    pub(crate) async fn wait_for_agreement(&mut self, found: &mut Findings) -> Result<()> {
        let state = self.community()?.state();
        let what = "the host has the events of the anchor";
        self.wait_until(found, what, "true", |gauges| gauges.state() == state)
            .await
    }

    /// Checks that the anchor gets this many events of an author.
    pub(crate) async fn passed_on(
        &mut self,
        found: &mut Findings,
        author: &NodeId,
        events: u64,
    ) -> Result<()> {
        let heard = self.community()?.wait_for_events(author, events).await;
        found.same("events that are passed on", true, heard);
        Ok(())
    }

    /// Connection of the node with this key to a path, and the head of the host's answer.
    pub(crate) async fn upgrade(&self, key: &NodeKey, path: &str) -> Result<(Peer, String)> {
        let credentials = Credentials::of(&key.secret());
        let mut peer = self.secured_with(&credentials).await?;
        let answer = peer.upgrade_at(path).await?;
        Ok((peer, answer))
    }

    /// Whether the host opens a path for the node with this key.
    pub(crate) async fn admits(&self, key: &NodeKey, path: &str) -> Result<bool> {
        let (_, answer) = self.upgrade(key, path).await?;
        Ok(answer.starts_with(SWITCHING))
    }

    /// Joins through the victim with an invite code and a new key, in a single attempt.
    pub(crate) async fn join(&mut self, invite: &Invite) -> Result<Level> {
        let key = new_key()?;
        let request = invite.request(key.id(), "kim")?;
        let home = tempfile::tempdir()?;
        let log = EventLog::prepare(home.path(), invite.community())?;
        let (client, expected) = (self.target.client(&key).await?, self.target.node);
        let joined = join_through(&client, expected, &request, &log, |_| {}).await;
        joined.map_err(HarnessError::honest)
    }

    /// The suite's own program.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Starts another node like the victim, in a folder made by [`TestCommunity::home`].
    pub(crate) async fn another(&self, home: &Path) -> Result<Victim> {
        let settings = Settings {
            model: self.model.clone(),
            which: self.which,
            admitted: Vec::new(),
            home: Some(home.to_owned()),
            pace: self.pace,
            kv_pages: None,
        };
        Victim::start(&self.program, &settings).await
    }

    /// Copies of the attacker's key and of the guest's key.
    pub(crate) fn members(&self) -> [NodeKey; 2] {
        [&self.attacker, &self.guest].map(|key| NodeKey::from_secret(&key.secret()))
    }

    /// Content of a valid token of this node, to be signed or changed first.
    pub(crate) fn grant(&self, key: &NodeKey) -> Result<Grant> {
        grant(key, self.target.node)
    }

    /// Returns the victim's answer to a HELLO with this token from the attacker. If the victim
    /// opens a session, it is closed again.
    ///
    /// # Errors
    /// If the attacker does not get as far as HELLO.
    pub(crate) async fn show(&self, token: Vec<u8>) -> Result<Ending> {
        let mut peer = self.upgraded().await?;
        let answer = peer.ask(Hello::new("pipeline", token).frame()).await;
        let opened = Ending {
            opened: true,
            ..Ending::default()
        };
        Ok(match answer.is(kind::HELLO) {
            true => opened,
            false => peer.ending_after(answer).await,
        })
    }

    /// HELLO of the attacker for a purpose (`pipeline`, `bench`), with a fresh, valid token.
    pub(crate) fn hello(&self, purpose: &str) -> Result<Hello> {
        let token = token(&self.attacker, self.target.node)?;
        Ok(Hello::new(purpose, token))
    }

    fn credentials(&self) -> Credentials {
        Credentials::of(&self.attacker.secret())
    }

    /// Connection of the attacker, as far as TLS.
    pub(crate) async fn secured(&self) -> Result<Peer> {
        self.secured_with(&self.credentials()).await
    }

    /// Connection with any credentials, as far as TLS.
    pub(crate) async fn secured_with(&self, credentials: &Credentials) -> Result<Peer> {
        Ok(Peer::secured(self.target.addr, credentials).await?)
    }

    /// Connection of the attacker, as far as the WebSocket.
    pub(crate) async fn upgraded(&self) -> Result<Peer> {
        Ok(Peer::upgraded(self.target.addr, &self.credentials()).await?)
    }

    /// Session of the attacker, with a HELLO of its own.
    pub(crate) async fn session(&self, hello: &Hello) -> Result<Peer> {
        Ok(self.upgraded().await?.greeted(hello).await?)
    }

    /// Session of the attacker for running rows.
    pub(crate) async fn pipeline(&self) -> Result<Peer> {
        self.session(&self.hello("pipeline")?).await
    }

    /// Valid STREAM_OPEN: epoch 1 of this stream, all layers of the victim.
    pub(crate) fn stream_open(&self, stream: u32) -> Frame {
        stream_open(stream, &self.target.weights, self.target.layers, 16)
    }

    /// Session of the attacker with stream 1 open.
    pub(crate) async fn stream(&self) -> Result<Peer> {
        let mut peer = self.pipeline().await?;
        let answer = peer.ask(self.stream_open(1)).await;
        match answer.is(kind::STREAM_OPENED) {
            true => Ok(peer),
            false => Err(HarnessError::attacker(format!("no stream: {answer:?}"))),
        }
    }

    /// Valid first step of a stream, with `rows` rows of zeros.
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

pub(crate) fn new_key() -> Result<NodeKey> {
    Ok(NodeKey::generate()?)
}
