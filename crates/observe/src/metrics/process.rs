//! Process metrics from the operating system, under the standard `process_*` names of Prometheus client libraries.

use crate::metrics::exposition::MetricsWriter;

/// Writes the process metrics that are available.
pub(crate) fn write(page: &mut MetricsWriter) {
    let Some(stats) = ProcStats::read() else { return };
    let mut counter = |name, help, value: f64| page.counters(name, help).add(&[], value);
    counter("process_cpu_seconds_total", "CPU time in user and system mode, in seconds.", stats.cpu_seconds);
    page.gauge("process_resident_memory_bytes", "Resident memory size in bytes.", stats.resident);
    page.gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", stats.mapped);
    page.gauge(
        "process_start_time_seconds",
        "Start time of the process in seconds since the Unix epoch.",
        stats.started,
    );
    page.gauge("process_threads", "Number of threads.", stats.threads);
    if let Some(open) = stats.open_files {
        page.gauge("process_open_fds", "Number of open file descriptors.", open);
    }
    if let Some(max) = stats.max_files {
        page.gauge("process_max_fds", "Maximum number of open file descriptors.", max);
    }
}

/// Returns the resident memory size of this process in bytes.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    ProcStats::read().map(|stats| stats.resident)
}

struct ProcStats {
    cpu_seconds: f64,
    resident: u64,
    mapped: u64,
    started: f64,
    threads: u64,
    open_files: Option<usize>,
    max_files: Option<u64>,
}

impl ProcStats {
    fn read() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The process name is in parentheses, and may contain some itself.
        let fields: Vec<&str> = stat.get(stat.rfind(')')? + 2..)?.split(' ').collect();
        let number = |field: usize| fields.get(field - 3).and_then(|text| text.trim().parse::<u64>().ok());
        // Clock ticks per second and page size come from `auxv`; these values hold on all supported platforms.
        let (ticks, page) = (100.0, 4_096);
        let boot = std::fs::read_to_string("/proc/stat").ok()?;
        let boot: f64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
        Some(Self {
            cpu_seconds: (number(14)? + number(15)?) as f64 / ticks,
            threads: number(20)?,
            started: boot + number(22)? as f64 / ticks,
            mapped: number(23)?,
            resident: number(24)? * page,
            open_files: std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count),
            max_files: files.and_then(|rest| rest.split_whitespace().next()?.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::exposition::ExpositionFormat;

    #[test]
    fn the_stats_are_those_of_this_process() {
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        write(&mut page);
        let text = page.finish();
        let metric = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {text}"))
        };
        assert!(metric("process_resident_memory_bytes") > 100_000.0);
        assert!(metric("process_open_fds") >= 3.0);
        assert!(metric("process_start_time_seconds") > 1.7e9);
        assert!(metric("process_threads") >= 1.0);
    }
}
