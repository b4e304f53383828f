"""What a step costs on a simulated machine, in seconds: a function of the plan. `conf/cost_model/*.yaml` choose one."""

from kvlab.engine.cost.base import CostModel, ModelShape
from kvlab.engine.cost.constant import Constant
from kvlab.engine.cost.fit import Errors, Fit, Fitted, fit_steps
from kvlab.engine.cost.linear import Linear
from kvlab.engine.cost.roofline import Roofline
from kvlab.engine.cost.work import StepWork, step_work

__all__ = ["Constant", "CostModel", "Errors", "Fit", "Fitted", "Linear", "ModelShape", "Roofline", "StepWork", "fit_steps", "step_work"]
