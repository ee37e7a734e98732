//! The upstream: 16 workers and a queue without a bound, with a log-normal service time, of one endpoint or of a slow one besides.
//!
//! A worker goes on with a request whose client has left, as a thread pool does. The time at which a request should have
//! ended is where the worker's next one begins, so that late timers do not lower the capacity.

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate_core::conformance::SplitMix64;

/// Workers, and their mean service time in seconds.
pub(crate) const WORKERS: usize = 16;
pub(crate) const SERVICE: f64 = 0.04;
/// Requests a second that they can serve.
pub(crate) const CAPACITY: f64 = WORKERS as f64 / SERVICE;
/// How many times as long a request of a slow endpoint takes.
const SLOW: f64 = 10.0;

/// How long requests take.
#[derive(Clone, Copy)]
pub(crate) struct ServiceTime {
    /// Sigma of the log-normal time.
    pub(crate) sigma: f64,
    /// Part of the requests that are of an endpoint ten times as slow as the others.
    pub(crate) slow_part: f64,
}

impl ServiceTime {
    fn time(self, mean: f64, random: &mut SplitMix64) -> Duration {
        let is_slow = self.slow_part > 0.0 && random.fraction() < self.slow_part;
        let mean = if is_slow { SLOW * mean } else { mean };
        Duration::from_secs_f64(random.log_normal(mean, self.sigma))
    }
}

pub(crate) type Answer = Response<Full<Bytes>>;

struct Job {
    arrived: Instant,
    done: oneshot::Sender<()>,
}

/// A running upstream, stopped on drop.
pub(crate) struct Upstream {
    pub(crate) workers: Workers,
    _tasks: JoinSet<()>,
}

/// The workers' queue.
#[derive(Clone)]
pub(crate) struct Workers {
    queue: mpsc::UnboundedSender<Job>,
    /// Mean service time in microseconds.
    mean: Arc<AtomicU64>,
}

impl Upstream {
    pub(crate) fn start(service: ServiceTime, seed: u64) -> Self {
        let (queue, jobs) = mpsc::unbounded_channel::<Job>();
        let jobs = Arc::new(Mutex::new(jobs));
        let mean = Arc::new(AtomicU64::new((SERVICE * 1e6) as u64));
        let mut tasks = JoinSet::new();
        for worker in 0..WORKERS as u64 {
            let (jobs, mean) = (Arc::clone(&jobs), Arc::clone(&mean));
            let mut random = SplitMix64::new(seed ^ (worker << 32));
            tasks.spawn(async move {
                let mut free = Instant::now();
                loop {
                    let next = jobs.lock().await.recv().await;
                    let Some(job) = next else { return };
                    let mean = mean.load(Ordering::Relaxed) as f64 / 1e6;
                    free = free.max(job.arrived) + service.time(mean, &mut random);
                    tokio::time::sleep_until(free).await;
                    // The client may have left.
                    let _ = job.done.send(());
                }
            });
        }
        Self { workers: Workers { queue, mean }, _tasks: tasks }
    }
}

impl Workers {
    /// Sets how many times as long a request takes from now on.
    pub(crate) fn slow_down(&self, factor: f64) {
        self.mean.store((SERVICE * factor * 1e6) as u64, Ordering::Relaxed);
    }

    /// Answers a request when a worker has served it.
    pub(crate) async fn serve(&self) -> Answer {
        let (done, served) = oneshot::channel();
        let is_queued = self.queue.send(Job { arrived: Instant::now(), done }).is_ok();
        let is_served = is_queued && served.await.is_ok();
        let mut answer = Response::new(Full::new(Bytes::from_static(b"hello")));
        if !is_served {
            *answer.status_mut() = hyper::StatusCode::BAD_GATEWAY;
        }
        answer
    }
}

/// A running HTTP server, stopped on drop.
pub(crate) struct Listening {
    pub(crate) address: SocketAddr,
    _task: JoinSet<()>,
}

/// Serves HTTP/1 on a free port.
pub(crate) async fn listen<S, B>(service: S) -> Result<Listening, String>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(|error| error.to_string())?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    let mut task = JoinSet::new();
    task.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let Ok((stream, _)) = listener.accept().await else { continue };
            let _ = stream.set_nodelay(true);
            let service = service.clone();
            connections.spawn(async move {
                let connection = hyper::server::conn::http1::Builder::new();
                let _ = connection.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    Ok(Listening { address, _task: task })
}
