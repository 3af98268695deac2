"""The contract of monitors."""

from polyaccel_mlflow.monitor import MlflowMonitor

from polyaccel.testkit.monitor import MonitorContract


class TestMlflow(MonitorContract):
    def make(self) -> MlflowMonitor:
        return MlflowMonitor()
