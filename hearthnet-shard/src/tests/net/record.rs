//! Access to the flight record of a standalone host. (All tests of this program share one record,
//! so they check only their own events.)

use hearthnet_bus::calls::{CallError, Client, Code};
use hearthnet_bus::flight::{self, Answer, Event, SessionId};
use hearthnet_bus::node::bus_rule;
use hearthnet_bus::{Capability, NodeId};
use hearthnet_transport::connect_path;

use super::*;

async fn connected(host: &Host, key: &NodeKey) -> Result<Client, ConnectError> {
    let addr = host.running.local_addr().to_string();
    let (identity, expected) = (key.identity().unwrap(), Some(host_key().id()));
    let (rule, config) = (bus_rule(), config().transport);
    let socket = connect_path(&addr, &identity, expected, &rule, &config).await?;
    Ok(Client::new(
        socket,
        Arc::new(NodeKey::from_secret(&key.secret())),
    ))
}

async fn told(host: &Host, key: &NodeKey) -> Answer {
    let client = connected(host, key).await.unwrap();
    let asked = flight::now();
    let call = client.call(&Capability::diagnose(), &flight::params(None));
    Answer::collect(asked, call.unwrap()).await.unwrap()
}

/// Sessions that began, according to a record.
fn sessions(answer: &Answer) -> Vec<(SessionId, NodeId)> {
    let began = answer.page.records.iter().filter_map(|r| match &r.event {
        Event::SessionBegan { session, peer, .. } => Some((*session, *peer)),
        _ => None,
    });
    began.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_owner_gets_all_records_and_a_caller_its_own() {
    let [one, other] = [21, 22].map(|seed| NodeKey::from_secret(&[seed; 32]));
    let host = Host::start_with(|config| config.admitted = vec![one.id(), other.id()]).await;
    let mut began = Vec::new();
    for key in [&one, &other] {
        let token = token(key);
        let session = SessionId::of_token(&token);
        let mut caller = host.try_connect(key, PIPELINE, token).await.unwrap();
        caller.open(1).await.unwrap();
        began.push((session, key.id()));
    }
    for (key, session) in [&one, &other].into_iter().zip(&began) {
        let answer = told(&host, key).await;
        assert!(answer.page.partial);
        assert_eq!(sessions(&answer), [*session]);
        let me = key.id();
        for record in &answer.page.records {
            assert!(record.event.concerns(&me), "{record:?}");
        }
        let opened = |r: &flight::Record| matches!(r.event, Event::StreamOpened { .. });
        assert!(answer.page.records.iter().any(opened));
    }
    let all = told(&host, &host_key()).await;
    assert!(!all.page.partial);
    assert!(began.iter().all(|one| sessions(&all).contains(one)));
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_no_records_and_other_capabilities_do_not_exist() {
    let host = Host::start().await;
    let stranger = NodeKey::from_secret(&[23; 32]);
    let refused = connected(&host, &stranger).await;
    assert!(
        matches!(refused, Err(ConnectError::Refused { by, code: CloseCode::Unauthorized }) if by == host_key().id()),
        "{refused:?}"
    );
    let client = connected(&host, &caller_key()).await.unwrap();
    let ask = async |what: &Capability| -> Result<_, CallError> {
        client.call(what, &flight::params(None))?.result().await
    };
    let grant = ask(&Capability::shard_serve()).await.unwrap_err();
    assert_eq!(grant.code(), &Code::NOT_FOUND);
    let stream = host.connect(PIPELINE).await.open(1).await;
    assert_eq!(
        stream,
        Ok(()),
        "calls are no sessions, and take nothing from them"
    );
}
